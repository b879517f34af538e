# SPDX-License-Identifier: Apache-2.0
"""The dashboards: the fleet, one tier, and its janitor. What vLLM names itself is asked for by our recording rules."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from kvtier_monitoring.panels import AnyPanel, amount, board, choice, figure, graph, listing

_TIER = 'namespace="$namespace", tier="$tier"'
_NAMED = "{{namespace}}/{{tier}}"


def _rate(metric: str, by: str, where: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{where}}}[$__rate_interval]))"


def fleet() -> Dashboard:
    """Return what a platform team looks at: all tiers, and the operator."""
    tier = "namespace, tier"
    cached, computed = (
        f"sum by ({tier}) (kvtier:prompt_tokens_cached:rate5m)",
        f"sum by ({tier}) (kvtier:prompt_tokens:rate5m)",
    )
    shown = board("kvtier-fleet", "kvtier / Fleet", "All KVCacheTiers that this Prometheus sees, and the operator.")
    panels: list[AnyPanel] = [
        figure("Tiers", "short", 'count(max by (namespace, tier) (kvtier_tier_condition{condition="Ready"}))'),
        figure(
            "Ready",
            "short",
            'count(max by (namespace, tier) (kvtier_tier_condition{condition="Ready", status="True"})) or vector(0)',
        ),
        figure(
            "Engines ready",
            "percentunit",
            'sum(max by (namespace, tier) (kvtier_tier_engines{state="ready"})) / sum(max by (namespace, tier) (kvtier_tier_engines{state="wanted"}) > 0)',
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
            about="Of all tokens of prompts, the share that no engine had to compute.",
        ),
        figure(
            "Prefill saved, in engines",
            "short",
            "sum(kvtier:prefill_seconds_saved:rate5m)",
            about="Engine seconds for each second: 2 means that two engines more would be busy without.",
            decimals=2,
        ),
        listing(
            "Tiers",
            'max by (namespace, tier, status, reason) (kvtier_tier_condition{condition="Ready"})',
            ("Value",),
            about="Why a tier is not ready; docs/conditions.md says what to do.",
        ),
        graph("Prompts from caches", "percentunit", {_NAMED: f"{cached} / ({computed} > 0)"}),
        graph(
            "Where prompts came from",
            "short",
            {
                "{{source}}": "sum by (source) (kvtier:prompt_tokens_cached:rate5m)",
                "computed": "sum(kvtier:prompt_tokens:rate5m) - sum(kvtier:prompt_tokens_cached:rate5m)",
            },
            about="Tokens a second: device is the GPU, host the CPU tier, disk the volume.",
        ),
        graph("Volume used of budget", "percentunit", {_NAMED: "kvtier:volume_used:ratio"}),
        graph(
            "Prefill saved, in engines",
            "short",
            {_NAMED: f"sum by ({tier}) (kvtier:prefill_seconds_saved:rate5m)"},
            about="Engine seconds for each second.",
        ),
        graph("Read from volumes", "Bps", {_NAMED: _rate("vllm:kvtier_disk_read_bytes_total", tier)}),
        graph("Written to volumes", "Bps", {_NAMED: _rate("vllm:kvtier_disk_written_bytes_total", tier)}),
        graph("Operator: passes", "ops", {"{{outcome}}": _rate("kvtier_operator_reconcile_total", "outcome")}, parts=3),
        graph("Operator: tiers that wait", "short", {"{{pod}}": "max by (pod) (kvtier_operator_queue_depth)"}, parts=3),
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
    """Return what the owner of one tier looks at."""
    shown = board("kvtier-tier", "kvtier / Tier", "One KVCacheTier: what it saves, what it costs, and what hinders it.")
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
        figure("Engines ready", "short", f'max(kvtier_tier_engines{{{_TIER}, state="ready"}})'),
        figure("Volume used of budget", "percentunit", f"kvtier:volume_used:ratio{{{_TIER}}}"),
        figure(
            "Prompts from caches",
            "percentunit",
            f"sum(kvtier:prompt_tokens_cached:rate5m{{{_TIER}}}) / (sum(kvtier:prompt_tokens:rate5m{{{_TIER}}}) > 0)",
        ),
        figure("Prefill saved, in engines", "short", saved, about="Engine seconds for each second.", decimals=2),
        figure(
            "Saved an hour",
            "currencyUSD",
            f"{saved} * $price - {storage}",
            about="At the prices above: engine seconds saved, less the cost of the used part of the volume.",
            decimals=2,
        ),
        figure(
            "Written per byte served",
            "short",
            f"{written} / ({served} > 0)",
            about="Over the time shown by one point. High while a cache fills, below 1 where it pays.",
            decimals=2,
        ),
        graph(
            "Hits by tier",
            "short",
            {
                "{{source}}": f"sum by (source) (kvtier:prompt_tokens_cached:rate5m{{{_TIER}}})",
                "computed": f"sum(kvtier:prompt_tokens:rate5m{{{_TIER}}}) - sum(kvtier:prompt_tokens_cached:rate5m{{{_TIER}}})",
            },
            about="Tokens of prompts a second: device is the GPU, host the CPU tier, disk the volume.",
        ),
        graph(
            "First token, by what was found",
            "s",
            {
                "{{found}}": f"sum by (found) (rate(vllm:kvtier_first_token_seconds_total{{{_TIER}}}[$__rate_interval])) / ({first})"
            },
            about="Mean seconds from arrival to first token: of requests whose beginning came from disk, from memory, or was computed.",
        ),
        graph(
            "Length of these prompts",
            "short",
            {
                "{{found}}": f"sum by (found) (rate(vllm:kvtier_first_token_prompt_tokens_total{{{_TIER}}}[$__rate_interval])) / ({first})"
            },
            about="Mean tokens: hits of long prompts are compared with misses of short ones otherwise.",
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
            "short",
            {"{{pod}}": f"kvtier:prefill_seconds_saved:rate5m{{{_TIER}}}"},
            about="Engine seconds for each second: the tokens that came from the volume, at the pace at which engines compute and load.",
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
        graph("Written per byte served", "short", {"ratio": f"{written} / ({served} > 0)"}, parts=3),
        graph(
            "Evicted",
            "cps",
            {"{{reason}}": _rate("kvtier_janitor_evicted_blocks_total", "reason", _TIER)},
            about="Blocks a second.",
            parts=3,
        ),
        graph(
            "Computing against loading",
            "short",
            {
                "computes {{pod}}": f"max by (pod) (vllm:kvtier_disk_compute_tokens_per_second{{{_TIER}}})",
                "loads {{pod}}": f"max by (pod) (vllm:kvtier_disk_load_tokens_per_second{{{_TIER}}})",
            },
            about="Tokens a second, as each engine measured both.",
        ),
        graph(
            "Verdicts",
            "cps",
            {"{{verdict}}": _rate("vllm:kvtier_disk_verdicts_total", "verdict", _TIER)},
            about="Requests that found blocks on the volume, by what was decided.",
        ),
        graph(
            "Not served from the volume",
            "cps",
            {"{{cause}}": _rate("vllm:kvtier_disk_misses_total", "cause", _TIER)},
            about="By cause; absent is a prompt that nobody has asked before.",
            parts=3,
        ),
        graph(
            "Not written",
            "cps",
            {"{{cause}}": _rate("vllm:kvtier_disk_shed_stores_total", "cause", _TIER)},
            about="Blocks by cause.",
            parts=3,
        ),
        graph(
            "Breakers",
            "short",
            {
                "loads {{pod}}": f"max by (pod) (vllm:kvtier_disk_load_breaker{{{_TIER}}})",
                "stores {{pod}}": f"max by (pod) (vllm:kvtier_disk_store_breaker{{{_TIER}}})",
            },
            about="0 lets through, 1 on trial, 2 leaves the volume alone.",
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
            "Oldest job", "s", {"{{pod}}": f"max by (pod) (vllm:kvtier_disk_oldest_job_seconds{{{_TIER}}})"}, parts=3
        ),
        graph(
            "Movers",
            "short",
            {
                "processes {{pod}}": f"max by (pod) (vllm:kvtier_disk_io_processes{{{_TIER}}})",
                "held up {{pod}}": f"max by (pod) (vllm:kvtier_disk_stuck_threads{{{_TIER}}})",
            },
            about="Processes that move blocks, and what the volume holds up.",
            parts=3,
        ),
        graph(
            "Requests",
            "short",
            {
                "running {{pod}}": f"kvtier:requests_running{{{_TIER}}}",
                "waiting {{pod}}": f"kvtier:requests_waiting{{{_TIER}}}",
            },
            parts=3,
        ),
        graph("GPU KV cache used", "percentunit", {"{{pod}}": f"kvtier:kv_cache_usage:ratio{{{_TIER}}}"}, parts=3),
        graph(
            "Preemptions",
            "cps",
            {"{{pod}}": f"kvtier:preemptions:rate5m{{{_TIER}}}"},
            about="Running requests that were taken back for want of KV cache.",
            parts=3,
        ),
        listing(
            "Conditions",
            f"max by (condition, status, reason) (kvtier_tier_condition{{{_TIER}}})",
            ("Value",),
            about="docs/conditions.md says what each reason means and what to do.",
        ),
    ]
    for number, panel in enumerate(panels, 1):
        shown.with_panel(panel.id(number))
    return shown


def janitor() -> Dashboard:
    """Return what shows how the volume of one tier is kept."""
    shown = board("kvtier-janitor", "kvtier / Janitor", "What lies on the volume of one tier, and what is removed.")
    shown.with_variable(choice("namespace", "Namespace", "label_values(kvtier_janitor_active, namespace)"))
    shown.with_variable(choice("tier", "Tier", 'label_values(kvtier_janitor_active{namespace="$namespace"}, tier)'))
    acting = f"* on (namespace, tier, instance) group_left () (kvtier_janitor_active{{{_TIER}}} == 1)"
    panels: list[AnyPanel] = [
        figure("Acting", "short", f"sum(kvtier_janitor_active{{{_TIER}}})", about="1 while a janitor holds the Lease."),
        figure("Blocks", "short", f"sum(kvtier_janitor_blocks{{{_TIER}}} {acting})"),
        figure("Used", "bytes", f"sum(kvtier_janitor_used_bytes{{{_TIER}}} {acting})"),
        figure(
            "Free on the volume",
            "percentunit",
            f"max(kvtier_janitor_volume_free_bytes{{{_TIER}}} / (kvtier_janitor_volume_bytes{{{_TIER}}} > 0))",
        ),
        figure("Oldest block", "s", f"time() - max(kvtier_janitor_oldest_timestamp_seconds{{{_TIER}}} > 0)"),
        figure("Damaged files", "short", f"max(kvtier_janitor_quarantined_files{{{_TIER}}})"),
        graph(
            "Used of budget",
            "bytes",
            {
                "generation {{generation}}": f"sum by (generation) (kvtier_janitor_used_bytes{{{_TIER}}})",
                "budget": f"max(kvtier_janitor_max_bytes{{{_TIER}}})",
            },
        ),
        graph(
            "Blocks", "short", {"generation {{generation}}": f"sum by (generation) (kvtier_janitor_blocks{{{_TIER}}})"}
        ),
        graph(
            "Evicted",
            "cps",
            {"{{reason}}": _rate("kvtier_janitor_evicted_blocks_total", "reason", _TIER)},
            about="Blocks a second by reason.",
            parts=3,
        ),
        graph("Evicted", "Bps", {"{{reason}}": _rate("kvtier_janitor_evicted_bytes_total", "reason", _TIER)}, parts=3),
        graph(
            "Spared",
            "cps",
            {"blocks": f"sum(rate(kvtier_janitor_spared_blocks_total{{{_TIER}}}[$__rate_interval]))"},
            about="Blocks that were chosen, and used in time to stay.",
            parts=3,
        ),
        graph(
            "Engines are asked to stop storing", "short", {"braked": f"max(kvtier_janitor_braked{{{_TIER}}})"}, parts=3
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
            about="The ten largest; the one without a name are blocks that belong to nobody in particular.",
            parts=3,
        ),
        graph(
            "Problems",
            "short",
            {"{{what}}": f"max by (what) (kvtier_janitor_problem{{{_TIER}}}) or vector(0)"},
            about="What it cannot do now; docs/conditions.md, JanitorHindered.",
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
