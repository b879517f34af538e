# SPDX-License-Identifier: Apache-2.0
"""One container: started, probed, restarted with growing delays, and ended in order.

Everything happens in the event loop. `run` owns the process; `stop` and the probes only ask it to end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from kvtier_localcluster.errors import ConfigMissing, StartFailed, VolumeMissing
from kvtier_localcluster.kinds import Json, key_of, seconds_since, timestamp
from kvtier_localcluster.node.launching import last_words_file, make_launch
from kvtier_localcluster.node.probes import ProbeTarget, Tally, Verdict, look
from kvtier_localcluster.node.processes import ContainerProcess, Launch
from kvtier_localcluster.node.services import PodServices
from kvtier_localcluster.node.status import ContainerState, Termination
from kvtier_localcluster.recorder import Happening


def read_log(path: Path, tail: int | None) -> bytes:
    """Return a log, or its last lines; nothing where there is no log yet."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        return b"".join(deque(file, tail))


_LOG = logging.getLogger(__name__)
_CONFIG_RETRY_SECONDS = 5.0
_START_ERROR_CODE = 128
_MOST_LAST_WORDS = 4096
_LAST_LINES, _LAST_LOG_BYTES = 80, 2048
_GRACE_AFTER_HOOK_SECONDS = 2.0


class ContainerRunner:
    """Runs one container of a pod until it has ended for good."""

    def __init__(self, container: Json, services: PodServices, *, is_init: bool = False) -> None:
        """Store; `run` works."""
        self.container = container
        self.state = ContainerState(name=container["name"], image=container.get("image", ""), is_init=is_init)
        self._services = services
        self._stopping = asyncio.Event()
        self._process: ContainerProcess | None = None
        self._hook_has_run = False
        self._failures = 0

    async def run(self) -> None:
        """Run, and restart as the policy says, until the end."""
        while not self._stopping.is_set():
            launch = self._prepare()
            if launch is None:
                await self._pause(_CONFIG_RETRY_SECONDS, for_config=True)
                continue
            ended = await self._run_once(launch)
            self.state.ended = ended
            self._services.report()
            if self._stopping.is_set() or not self._is_restarted_after(ended):
                return
            await self._wait_for_restart(ended)

    async def stop(self, grace_seconds: float) -> None:
        """End the container: hook, SIGTERM, after the grace period SIGKILL to all of it; called again, it hurries."""
        self._stopping.set()
        process = self._process
        if process is not None:
            self._tell("Killing", f"Stopping container {self.state.name}")
            await self._end(process, grace_seconds)

    def refresh(self) -> None:
        """Write the files of the container's volumes anew where their source changed."""
        if self._process is not None:
            try:
                make_launch(self.container, self._services)
            except (ConfigMissing, VolumeMissing) as problem:
                _LOG.debug("%s keeps the files it has: %s", self.state.name, problem)

    def _prepare(self) -> Launch | None:
        state = self.state
        try:
            return make_launch(self.container, self._services)
        except (ConfigMissing, VolumeMissing, OSError) as problem:
            state.waiting_reason = (
                "CreateContainerError" if isinstance(problem, OSError) else "CreateContainerConfigError"
            )
            state.waiting_message = str(problem)
            self._tell("Failed", f"Error: {problem}", is_warning=True)
        self._services.report()
        return None

    async def _run_once(self, launch: Launch) -> Termination:
        state = self.state
        began = timestamp()
        try:
            process = await self._start(launch)
        except (StartFailed, OSError) as problem:
            state.waiting_reason, state.waiting_message = "RunContainerError", str(problem)
            self._tell("Failed", f"Error: {problem}", is_warning=True)
            return Termination(
                exit_code=_START_ERROR_CODE,
                reason="StartError",
                started_at=began,
                finished_at=timestamp(),
                message=str(problem),
            )
        self._process = process
        state.running_since, state.process_id, state.ended = began, process.pid, None
        state.is_started = "startupProbe" not in self.container
        state.is_ready = state.is_started and "readinessProbe" not in self.container
        self._tell("Started", f"Started container {state.name}")
        self._services.report()
        if self._stopping.is_set():
            process.kill()
        watching = asyncio.create_task(self._watch_over(process))
        code = await process.wait()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        self._process, self._hook_has_run = None, False
        state.running_since, state.is_started, state.is_ready = None, False, False
        reason = "Completed" if code == 0 else "Error"
        words = await asyncio.to_thread(self._last_words, code)
        return Termination(exit_code=code, reason=reason, started_at=began, finished_at=timestamp(), message=words)

    def _last_words(self, code: int) -> str:
        """Return what the container left in its terminationMessagePath, or the end of its log if it asks for that."""
        file = last_words_file(self.container, self._services)
        words = file.read_bytes()[:_MOST_LAST_WORDS] if file.exists() else b""
        file.unlink(missing_ok=True)
        if not words and code and self.container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            key = key_of(self._services.sources.pod)
            words = read_log(self._services.node.data.log(key, self.state.name), _LAST_LINES)[-_LAST_LOG_BYTES:]
        return words.decode(errors="replace")

    async def _start(self, launch: Launch) -> ContainerProcess:
        node, key = self._services.node, key_of(self._services.sources.pod)
        log = node.data.log(key, self.state.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        previous = node.data.previous_log(key, self.state.name)
        if self.state.last_ended is None:
            previous.unlink(missing_ok=True)  # of an earlier pod of the same name
        elif log.exists():
            log.replace(previous)
        with log.open("wb") as output:
            return await ContainerProcess.start(launch, output)

    def _is_restarted_after(self, ended: Termination) -> bool:
        policy = self._services.sources.pod["spec"].get("restartPolicy", "Always")
        if policy == "Always" and not self.state.is_init:
            return True
        return policy != "Never" and ended.exit_code != 0

    async def _wait_for_restart(self, ended: Termination) -> None:
        restarts = self._services.node.settings.restarts
        ran_seconds = seconds_since(ended.started_at) - seconds_since(ended.finished_at)
        self._failures = 1 if ran_seconds >= restarts.reset_seconds else self._failures + 1
        delay_seconds = restarts.delay_seconds(self._failures)
        namespace, name = key_of(self._services.sources.pod)
        uid = self._services.sources.pod["metadata"]["uid"]
        state = self.state
        state.last_ended, state.ended = ended, None
        state.waiting_reason = "CrashLoopBackOff"
        where = f"container={state.name} pod={name}_{namespace}({uid})"
        state.waiting_message = f"back-off {delay_seconds:g}s restarting failed {where}"
        if ended.reason == "StartError" and self._failures == 1:
            state.waiting_reason, state.waiting_message = "RunContainerError", ended.message
        message = f"Back-off restarting failed container {state.name} in pod {name}_{namespace}({uid})"
        self._tell("BackOff", message, is_warning=True)
        self._services.report()
        await self._pause(delay_seconds)
        if not self._stopping.is_set():
            state.restarts += 1

    async def _pause(self, seconds: float, *, for_config: bool = False) -> None:
        """Wait, but no longer than until the container is stopped (or its configuration changes)."""
        waits = {asyncio.create_task(self._stopping.wait())}
        if for_config:
            waits.add(asyncio.create_task(self._services.config_changed.wait()))
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    # ---- probes and hooks

    async def _watch_over(self, process: ContainerProcess) -> None:
        target = self._target()
        startup = self.container.get("startupProbe")
        if startup is not None and not await self._pass_startup(process, startup, target):
            return
        async with asyncio.TaskGroup() as group:
            if (liveness := self.container.get("livenessProbe")) is not None:
                group.create_task(self._watch_liveness(process, liveness, target))
            if (readiness := self.container.get("readinessProbe")) is not None:
                group.create_task(self._watch_readiness(readiness, target))

    async def _pass_startup(self, process: ContainerProcess, probe: Json, target: ProbeTarget) -> bool:
        async for verdict in self._verdicts("startup", probe, target):
            if verdict is Verdict.FAILURE:
                await self._fail(process, "startup", probe)
                return False
            if verdict is Verdict.SUCCESS:
                break
        self.state.is_started = True
        self.state.is_ready = "readinessProbe" not in self.container
        self._services.report()
        return True

    async def _watch_liveness(self, process: ContainerProcess, probe: Json, target: ProbeTarget) -> None:
        async for verdict in self._verdicts("liveness", probe, target):
            if verdict is Verdict.FAILURE:
                await self._fail(process, "liveness", probe)
                return

    async def _watch_readiness(self, probe: Json, target: ProbeTarget) -> None:
        async for verdict in self._verdicts("readiness", probe, target):
            is_ready = self.state.is_ready if verdict is Verdict.UNDECIDED else verdict is Verdict.SUCCESS
            if is_ready != self.state.is_ready:
                self.state.is_ready = is_ready
                self._services.report()

    async def _verdicts(self, name: str, probe: Json, target: ProbeTarget) -> AsyncIterator[Verdict]:
        tally = Tally.of(probe)
        await asyncio.sleep(float(probe.get("initialDelaySeconds", 0)))
        while True:
            problem = await look(probe, target)
            if problem is not None:
                self._tell("Unhealthy", f"{name.capitalize()} probe failed: {problem}", is_warning=True)
            yield tally.add(is_success=problem is None)
            await asyncio.sleep(float(probe.get("periodSeconds", 10)))

    async def _fail(self, process: ContainerProcess, name: str, probe: Json) -> None:
        self._tell("Killing", f"Container {self.state.name} failed {name} probe, will be restarted")
        pod_seconds = self._services.sources.pod["spec"].get("terminationGracePeriodSeconds", 30)
        # The end of the process cancels the probe that asked for it, and must not cut the grace period short.
        ending = asyncio.create_task(self._end(process, probe.get("terminationGracePeriodSeconds", pod_seconds)))
        await asyncio.shield(ending)

    async def _end(self, process: ContainerProcess, grace_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_seconds
        hook = (self.container.get("lifecycle") or {}).get("preStop")
        if hook is not None and grace_seconds > 0 and not self._hook_has_run:
            self._hook_has_run = True
            if problem := await look({"timeoutSeconds": grace_seconds, **hook}, self._target()):
                self._tell("FailedPreStopHook", f"PreStopHook failed: {problem}", is_warning=True)
            deadline = max(deadline, loop.time() + _GRACE_AFTER_HOOK_SECONDS)
        process.terminate()
        try:
            async with asyncio.timeout(max(0.0, deadline - loop.time())):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def _target(self) -> ProbeTarget:
        return ProbeTarget(
            container=self.container,
            pod_ip=self._services.sources.pod_ip,
            session=self._services.node.session,
            execute=self._execute,
        )

    async def _execute(self, command: list[str]) -> tuple[int, str]:
        pieces: list[bytes] = []

        async def keep(_: int, piece: bytes) -> None:
            pieces.append(piece)

        return await self.execute(command, keep, None), b"".join(pieces).decode(errors="replace")

    async def execute(
        self, command: list[str], send: Callable[[int, bytes], Awaitable[None]], given: AsyncIterator[bytes] | None
    ) -> int:
        """Run a command inside the container and return its exit code; being cancelled ends the command."""
        try:
            launch = make_launch(self.container, self._services, command)
            process = await ContainerProcess.start(
                launch, asyncio.subprocess.PIPE, asyncio.subprocess.PIPE, has_input=given is not None
            )
        except (ConfigMissing, VolumeMissing, StartFailed, OSError) as problem:
            await send(2, str(problem).encode())
            return _START_ERROR_CODE
        feeding = None if given is None else asyncio.create_task(process.feed(given))
        try:
            await process.pour(send)
            return await process.wait()
        finally:
            if feeding is not None:
                feeding.cancel()
            process.kill()
            await process.wait()

    def _tell(self, reason: str, message: str, *, is_warning: bool = False) -> None:
        happening = Happening(reason=reason, message=message, is_warning=is_warning)
        self._services.tell(happening)
