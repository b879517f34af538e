# SPDX-License-Identifier: Apache-2.0
"""Keep the blocks of one tier within their budget until told to stop: ``python -m kvtier_connector.janitor``."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier_connector.contract.errors import ConnectorError
from kvtier_connector.contract.janitor import JANITOR_CONFIG_FILE, decode
from kvtier_connector.janitor.events import EventFeed, Publisher
from kvtier_connector.janitor.loop import Loop, make_elector
from kvtier_connector.janitor.metrics import Server, make_pages


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the janitor; return 0 when it was told to stop, 1 when it cannot run, 2 when it is misused."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtier_connector.janitor", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help=f"the operator's document, {JANITOR_CONFIG_FILE}"
    )
    parser.add_argument("--host", default="", metavar="ADDRESS", help="to serve on (default: every one)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = decode(options.config.read_text(encoding="utf-8"))
        elector = make_elector(config)
        publisher = feed = None
        if config.events_port >= 0:
            publisher = Publisher(host=options.host, port=config.events_port, topic=config.events_topic)
            feed = EventFeed(
                publisher, tier=config.tier, block_tokens=config.block_tokens, is_integer=config.events_integer_hashes
            )
        is_leader = elector.is_leader if elector else lambda: True
        loop = Loop(config, is_leader=is_leader, config_file=options.config, feed=feed)
        server = Server(options.host, config.http_port, make_pages(loop.report, health=loop.health))
    except (ConnectorError, OSError, ValueError) as error:
        print(f"kvtier janitor: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: loop.stop())
    server.start()
    if elector is not None:
        elector.start()
    print(f"serving on port {server.port}", flush=True)
    has_ended = loop.run()
    # Only now may another janitor act: this one has ended, or waits in a system call for ever.
    for part in (elector, publisher, server):
        if part is not None:
            part.close()
    logging.shutdown()
    if not has_ended:
        # A thread in a system call that never returns would keep the interpreter from ending.
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
