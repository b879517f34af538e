# SPDX-License-Identifier: Apache-2.0
"""The dashboards: all tiers, one tier, and its janitor. Queries use recording rules for metrics that vLLM names."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from kvtier_monitoring.panels import PLAIN, AnyPanel, Limits, amount, board, choice, figure, graph, listing

_TIER = 'namespace="$namespace", tier="$tier"'
_NAMED = "{{namespace}}/{{tier}}"


def _rate(metric: str, by: str, where: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{where}}}[$__rate_interval]))"


def fleet() -> Dashboard:
    """Return the dashboard of a platform team: all tiers, and the operator."""
    tier = "namespace, tier"
    cached, computed = (
        f"sum by ({tier}) (kvtier:prompt_tokens_cached:rate5m)",
        f"sum by ({tier}) (kvtier:prompt_tokens:rate5m)",
    )
    about = "All KVCacheTiers that this Prometheus sees, and the operator."
    shown = board("kvtier-fleet", "kvtier / Fleet", about, where="")
    panels: list[AnyPanel] = [
        figure("Tiers", PLAIN, 'count(max by (namespace, tier) (kvtier_tier_condition{condition="Ready"}))'),
        figure(
            "Not ready",
            PLAIN,
            'count(max by (namespace, tier) (kvtier_tier_condition{condition="Ready", status="False"})) or vector(0)',
            limits=Limits(red=1),
            alert="KVTierNotReady",
        ),
        figure(
            "Engines ready",
            "percentunit",
            'sum(max by (namespace, tier) (kvtier_tier_engines{state="ready"})) / sum(max by (namespace, tier) (kvtier_tier_engines{state="wanted"}) > 0)',
            limits=Limits(red=0.5, yellow=1),
            alert="KVTierNotServing",
        ),
        figure(
            "On volumes",
            "bytes",
            "sum(kvtier_janitor_used_bytes * on (namespace, tier, instance) group_left () (kvtier_janitor_active == 1))",
        ),
        figure(
            "Prompts from caches",
            "percentunit",
            "sum(kvtier:prompt_tokens_cached:rate5m) / (sum(kvtier:prompt_tokens:rate5m) > 0)",
            about="Share of all prompt tokens that no engine had to compute.",
        ),
        figure(
            "Prefill saved, in engines",
            PLAIN,
            "sum(kvtier:prefill_seconds_saved:rate5m)",
            about="Engine seconds saved per second. 2: without caches, two more engines would be busy.",
            decimals=2,
        ),
        listing(
            "Tiers",
            'max by (namespace, tier, status, reason) (kvtier_tier_condition{condition="Ready"})',
            ("Value",),
            about="Why a tier is not ready. docs/conditions.md says what to do.",
        ),
        graph("Prompts from caches", "percentunit", {_NAMED: f"{cached} / ({computed} > 0)"}),
        graph(
            "Where prompts came from",
            PLAIN,
            {
                "{{source}}": "sum by (source) (kvtier:prompt_tokens_cached:rate5m)",
                "computed": "sum(kvtier:prompt_tokens:rate5m) - sum(kvtier:prompt_tokens_cached:rate5m)",
            },
            axis="prompt tokens/s",
            about="device is the GPU, host the CPU tier, disk the volume.",
        ),
        graph(
            "Volume used of budget",
            "percentunit",
            {_NAMED: "kvtier:volume_used:ratio"},
            limits=Limits(red=1),
            alert="KVTierOverBudget",
        ),
        graph(
            "Prefill saved, in engines",
            PLAIN,
            {_NAMED: f"sum by ({tier}) (kvtier:prefill_seconds_saved:rate5m)"},
            axis="engines",
            about="Engine seconds saved per second.",
        ),
        graph("Read from volumes", "Bps", {_NAMED: _rate("vllm:kvtier_disk_read_bytes_total", tier)}),
        graph("Written to volumes", "Bps", {_NAMED: _rate("vllm:kvtier_disk_written_bytes_total", tier)}),
        graph(
            "Operator: reconciles",
            "ops",
            {"{{outcome}}": _rate("kvtier_operator_reconcile_total", "outcome")},
            parts=3,
            alert="KVTierOperatorFailing",
        ),
        graph(
            "Operator: tiers that wait",
            PLAIN,
            {"{{pod}}": "max by (pod) (kvtier_operator_queue_depth)"},
            axis="tiers",
            parts=3,
        ),
        graph(
            "Operator: API requests",
            "reqps",
            {"{{method}} {{code}}": _rate("kvtier_operator_api_requests_total", "method, code")},
            parts=3,
        ),
    ]
    for number, panel in enumerate(panels, 1):
        shown.with_panel(panel.id(number))
    return shown


def tier() -> Dashboard:
    """Return the dashboard of the owner of one tier."""
    about = "One KVCacheTier: what it saves, what it costs, and what hinders it."
    shown = board("kvtier-tier", "kvtier / Tier", about, where=_TIER)
    shown.with_variable(choice("namespace", "Namespace", "label_values(kvtier_tier_condition, namespace)"))
    shown.with_variable(choice("tier", "Tier", 'label_values(kvtier_tier_condition{namespace="$namespace"}, tier)'))
    shown.with_variable(amount("price", "Price of an engine hour", "2.5"))
    shown.with_variable(amount("gib_price", "Price of a GiB-month on the volume", "0.16"))
    saved = f"sum(kvtier:prefill_seconds_saved:rate5m{{{_TIER}}})"
    used = f"(max(sum by (instance) (kvtier_janitor_used_bytes{{{_TIER}}})) or vector(0))"
    storage = f"{used} / 1073741824 / 730 * $gib_price"
    written = f"sum(increase(vllm:kvtier_disk_written_bytes_total{{{_TIER}}}[$__rate_interval]))"
    served = f"sum(increase(vllm:kvtier_disk_read_bytes_total{{{_TIER}}}[$__rate_interval]))"
    first = f"sum by (found) (rate(vllm:kvtier_first_tokens_total{{{_TIER}}}[$__rate_interval])) > 0"
    panels: list[AnyPanel] = [
        figure(
            "Engines ready",
            "percentunit",
            f'max(kvtier_tier_engines{{{_TIER}, state="ready"}}) / (max(kvtier_tier_engines{{{_TIER}, state="wanted"}}) > 0)',
            about="Of those that the spec asks for.",
            limits=Limits(red=0.01, yellow=1),
            alert="KVTierNotServing",
        ),
        figure(
            "Volume used of budget",
            "percentunit",
            f"kvtier:volume_used:ratio{{{_TIER}}}",
            limits=Limits(red=1),
            alert="KVTierOverBudget",
        ),
        figure(
            "Prompts from caches",
            "percentunit",
            f"sum(kvtier:prompt_tokens_cached:rate5m{{{_TIER}}}) / (sum(kvtier:prompt_tokens:rate5m{{{_TIER}}}) > 0)",
        ),
        figure("Prefill saved, in engines", PLAIN, saved, about="Engine seconds saved per second.", decimals=2),
        figure(
            "Saved an hour",
            "currencyUSD",
            f"{saved} * $price - {storage}",
            about="At the prices above: engine seconds saved, less the price of the used part of the volume.",
            decimals=2,
        ),
        figure(
            "Written per byte served",
            PLAIN,
            f"{written} / ({served} > 0)",
            about="Within the interval of one point. High while a cache fills, below 1 where it pays.",
            decimals=2,
        ),
        graph(
            "Hits by tier",
            PLAIN,
            {
                "{{source}}": f"sum by (source) (kvtier:prompt_tokens_cached:rate5m{{{_TIER}}})",
                "computed": f"sum(kvtier:prompt_tokens:rate5m{{{_TIER}}}) - sum(kvtier:prompt_tokens_cached:rate5m{{{_TIER}}})",
            },
            axis="prompt tokens/s",
            about="device is the GPU, host the CPU tier, disk the volume.",
            alert="KVTierHitRateHalved",
        ),
        graph(
            "First token, by what was found",
            "s",
            {
                "{{found}}": f"sum by (found) (rate(vllm:kvtier_first_token_seconds_total{{{_TIER}}}[$__rate_interval])) / ({first})"
            },
            about="Mean time from arrival to first token, by where the beginning of the prompt came from.",
        ),
        graph(
            "Length of these prompts",
            PLAIN,
            {
                "{{found}}": f"sum by (found) (rate(vllm:kvtier_first_token_prompt_tokens_total{{{_TIER}}}[$__rate_interval])) / ({first})"
            },
            axis="tokens",
            about="Mean length of the prompts of the panel beside this one: compare times of equal lengths.",
        ),
        graph(
            "First token",
            "s",
            {
                "half are quicker": f"histogram_quantile(0.5, kvtier:first_token_seconds_bucket:rate5m{{{_TIER}}})",
                "95 % are quicker": f"histogram_quantile(0.95, kvtier:first_token_seconds_bucket:rate5m{{{_TIER}}})",
            },
        ),
        graph(
            "Used of budget",
            "bytes",
            {
                "generation {{generation}}": f"sum by (generation) (kvtier_janitor_used_bytes{{{_TIER}}})",
                "budget": f"max(kvtier_janitor_max_bytes{{{_TIER}}})",
            },
        ),
        graph(
            "Prefill saved, in engines",
            PLAIN,
            {"{{pod}}": f"kvtier:prefill_seconds_saved:rate5m{{{_TIER}}}"},
            axis="engines",
            about="Engine seconds saved per second: tokens from the volume, at the measured rate of computing.",
        ),
        graph(
            "Read and written",
            "Bps",
            {
                "read": f"sum(rate(vllm:kvtier_disk_read_bytes_total{{{_TIER}}}[$__rate_interval]))",
                "written": f"sum(rate(vllm:kvtier_disk_written_bytes_total{{{_TIER}}}[$__rate_interval]))",
            },
            parts=3,
        ),
        graph(
            "Written per byte served",
            PLAIN,
            {"ratio": f"{written} / ({served} > 0)"},
            axis="bytes written per byte read",
            parts=3,
        ),
        graph(
            "Evicted",
            "cps",
            {"{{reason}}": _rate("kvtier_janitor_evicted_blocks_total", "reason", _TIER)},
            axis="blocks",
            parts=3,
        ),
        graph(
            "CPU tier: bytes",
            "Bps",
            {"{{way}} {{pod}}": f"kvtier:cpu_tier_bytes:rate5m{{{_TIER}}}"},
            about="Copied between GPU and CPU tier. store: GPU to CPU. load: CPU to GPU.",
            parts=3,
        ),
        graph(
            "CPU tier: rate of a copy",
            "Bps",
            {
                "{{way}} {{pod}}": f"kvtier:cpu_tier_bytes:rate5m{{{_TIER}}} / (kvtier:cpu_tier_seconds:rate5m{{{_TIER}}} > 0)"
            },
            about="Bytes per second of copying, idle time left out: the bandwidth between GPU and host memory.",
            parts=3,
        ),
        graph(
            "CPU tier: operations",
            "cps",
            {"{{way}} {{pod}}": f"kvtier:cpu_tier_operations:rate5m{{{_TIER}}}"},
            axis="copies",
            parts=3,
        ),
        graph(
            "Rates of volume and prefill",
            PLAIN,
            {
                "computes {{pod}}": f"max by (pod) (vllm:kvtier_disk_compute_tokens_per_second{{{_TIER}}})",
                "loads {{pod}}": f"max by (pod) (vllm:kvtier_disk_load_tokens_per_second{{{_TIER}}})",
            },
            axis="tokens/s",
            about="As each engine measures both. By them it loads, splits or computes a hit.",
            alert="KVTierDiskSlowerThanComputing",
        ),
        graph(
            "Verdicts",
            "cps",
            {"{{verdict}}": _rate("vllm:kvtier_disk_verdicts_total", "verdict", _TIER)},
            axis="requests",
            about="Requests that found blocks on the volume, by decision.",
            parts=4,
        ),
        graph(
            "Split hits",
            PLAIN,
            # Nothing is counted before the first of them.
            {"{{cause}}": f"{_rate('vllm:kvtier_disk_split_tokens_total', 'cause', _TIER)} or on () vector(0)"},
            axis="tokens/s",
            about="computed: their heads. loaded: their tails. discarded: read, and computed by then.",
            parts=4,
        ),
        graph(
            "Not served from the volume",
            "cps",
            {"{{cause}}": _rate("vllm:kvtier_disk_misses_total", "cause", _TIER)},
            axis="blocks",
            about="By cause. absent: a prompt that was never asked before.",
            alert="KVTierDamagedBlocks",
            parts=3,
        ),
        graph(
            "Not written",
            "cps",
            {"{{cause}}": _rate("vllm:kvtier_disk_shed_stores_total", "cause", _TIER)},
            axis="blocks",
            about="By cause.",
            alert="KVTierVolumeFull",
            parts=3,
        ),
        graph(
            "Breakers",
            PLAIN,
            {
                "loads {{pod}}": f"max by (pod) (vllm:kvtier_disk_load_breaker{{{_TIER}}})",
                "stores {{pod}}": f"max by (pod) (vllm:kvtier_disk_store_breaker{{{_TIER}}})",
            },
            axis="state",
            about="0: closed. 1: on trial. 2: open, the engine leaves the volume alone.",
            limits=Limits(red=2, yellow=1),
            alert="KVTierBreakerOpen",
            parts=3,
        ),
        graph(
            "Queue",
            "bytes",
            {
                "to load {{pod}}": f"max by (pod) (vllm:kvtier_disk_queued_load_bytes{{{_TIER}}})",
                "to store {{pod}}": f"max by (pod) (vllm:kvtier_disk_queued_store_bytes{{{_TIER}}})",
            },
            parts=3,
        ),
        graph(
            "Oldest load or store",
            "s",
            {"{{pod}}": f"max by (pod) (vllm:kvtier_disk_oldest_job_seconds{{{_TIER}}})"},
            parts=3,
            limits=Limits(red=30, yellow=5),
        ),
        graph(
            "I/O workers",
            PLAIN,
            {
                "processes {{pod}}": f"max by (pod) (vllm:kvtier_disk_io_processes{{{_TIER}}})",
                "stuck {{pod}}": f"max by (pod) (vllm:kvtier_disk_stuck_threads{{{_TIER}}})",
            },
            axis="processes",
            about="Processes that move blocks, and those that wait for the volume beyond their deadline.",
            parts=3,
        ),
        graph(
            "Requests",
            PLAIN,
            {
                "running {{pod}}": f"kvtier:requests_running{{{_TIER}}}",
                "waiting {{pod}}": f"kvtier:requests_waiting{{{_TIER}}}",
            },
            axis="requests",
            parts=3,
        ),
        graph(
            "GPU KV cache used",
            "percentunit",
            {"{{pod}}": f"kvtier:kv_cache_usage:ratio{{{_TIER}}}"},
            parts=3,
            limits=Limits(red=0.98, yellow=0.9),
            alert="KVTierPreemptions",
        ),
        graph(
            "Preemptions",
            "cps",
            {"{{pod}}": f"kvtier:preemptions:rate5m{{{_TIER}}}"},
            axis="requests",
            about="Running requests that vLLM interrupts because the GPU's KV cache is full.",
            alert="KVTierPreemptions",
            parts=3,
        ),
        listing(
            "Conditions",
            f"max by (condition, status, reason) (kvtier_tier_condition{{{_TIER}}})",
            ("Value",),
            about="docs/conditions.md explains each reason and its remedy.",
        ),
    ]
    for number, panel in enumerate(panels, 1):
        shown.with_panel(panel.id(number))
    return shown


def janitor() -> Dashboard:
    """Return the dashboard of the janitor of one tier and its volume."""
    about = "Blocks on the volume of one tier, and their removal."
    shown = board("kvtier-janitor", "kvtier / Janitor", about, where=_TIER)
    shown.with_variable(choice("namespace", "Namespace", "label_values(kvtier_janitor_active, namespace)"))
    shown.with_variable(choice("tier", "Tier", 'label_values(kvtier_janitor_active{namespace="$namespace"}, tier)'))
    acting = f"* on (namespace, tier, instance) group_left () (kvtier_janitor_active{{{_TIER}}} == 1)"
    panels: list[AnyPanel] = [
        figure(
            "Acting",
            PLAIN,
            f"sum(kvtier_janitor_active{{{_TIER}}})",
            about="1 while a janitor holds the Lease.",
            limits=Limits(red=0, yellow=1),
            alert="KVTierJanitorDown",
        ),
        figure("Blocks", PLAIN, f"sum(kvtier_janitor_blocks{{{_TIER}}} {acting})"),
        figure("Used", "bytes", f"sum(kvtier_janitor_used_bytes{{{_TIER}}} {acting})"),
        figure(
            "Free on the volume",
            "percentunit",
            f"max(kvtier_janitor_volume_free_bytes{{{_TIER}}} / (kvtier_janitor_volume_bytes{{{_TIER}}} > 0))",
            limits=Limits(red=0.05, yellow=0.1),
            alert="KVTierVolumeFull",
        ),
        figure("Oldest block", "s", f"time() - max(kvtier_janitor_oldest_timestamp_seconds{{{_TIER}}} > 0)"),
        figure(
            "Damaged files",
            PLAIN,
            f"max(kvtier_janitor_quarantined_files{{{_TIER}}})",
            limits=Limits(red=1),
            alert="KVTierDamagedBlocks",
        ),
        graph(
            "Used of budget",
            "bytes",
            {
                "generation {{generation}}": f"sum by (generation) (kvtier_janitor_used_bytes{{{_TIER}}})",
                "budget": f"max(kvtier_janitor_max_bytes{{{_TIER}}})",
            },
        ),
        graph(
            "Blocks",
            PLAIN,
            {"generation {{generation}}": f"sum by (generation) (kvtier_janitor_blocks{{{_TIER}}})"},
            axis="blocks",
        ),
        graph(
            "Evicted",
            "cps",
            {"{{reason}}": _rate("kvtier_janitor_evicted_blocks_total", "reason", _TIER)},
            axis="blocks",
            parts=3,
        ),
        graph("Evicted", "Bps", {"{{reason}}": _rate("kvtier_janitor_evicted_bytes_total", "reason", _TIER)}, parts=3),
        graph(
            "Spared",
            "cps",
            {"blocks": f"sum(rate(kvtier_janitor_spared_blocks_total{{{_TIER}}}[$__rate_interval]))"},
            axis="blocks",
            about="Blocks that were chosen, and stay because they were used meanwhile.",
            parts=3,
        ),
        graph(
            "Engines may not store",
            PLAIN,
            {"1: stopped": f"max(kvtier_janitor_stores_paused{{{_TIER}}})"},
            axis="state",
            parts=3,
            limits=Limits(red=1),
            alert="KVTierJanitorBehind",
        ),
        graph("Sweeps", "s", {"last took": f"max(kvtier_janitor_sweep_seconds{{{_TIER}}})"}, parts=3),
        graph(
            "Since the last sweep",
            "s",
            {"seconds": f"time() - max(kvtier_janitor_last_sweep_timestamp_seconds{{{_TIER}}} > 0)"},
            parts=3,
        ),
        graph("Free on the volume", "bytes", {"free": f"max(kvtier_janitor_volume_free_bytes{{{_TIER}}})"}, parts=3),
        graph(
            "By tenant",
            "bytes",
            {"{{tenant}}": f"topk(10, max by (tenant) (kvtier_janitor_tenant_used_bytes{{{_TIER}}}))"},
            about="The ten largest. The one without a name: blocks of no tenant.",
            parts=3,
        ),
        graph(
            "Problems",
            PLAIN,
            {"{{what}}": f"max by (what) (kvtier_janitor_problem{{{_TIER}}}) or vector(0)"},
            axis="1 while it lasts",
            about="Work that the janitor cannot do now: docs/conditions.md, JanitorHindered.",
            limits=Limits(red=1),
            alert="KVTierJanitorProblem",
            parts=3,
        ),
        graph(
            "Memory",
            "bytes",
            {
                "{{pod}}": f"max by (pod) (process_resident_memory_bytes{{{_TIER}}} and on (instance) kvtier_janitor_active{{{_TIER}}})"
            },
            parts=3,
        ),
    ]
    for number, panel in enumerate(panels, 1):
        shown.with_panel(panel.id(number))
    return shown


BOARDS = {"fleet": fleet, "tier": tier, "janitor": janitor}
"""By the name of the file."""
