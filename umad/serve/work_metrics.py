"""What the engine has done, as families of metrics: labels are models and reasons, all known."""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from umad.core.batching import Why
from umad.serve.figures import ROWS


def families(shown: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """The families.

    Args:
        shown: ``Figures`` as plain values, by model.
    """
    rows = HistogramMetricFamily(
        "umad_serve_forward_rows",
        "Rows of the forwards that were done for several requests, or could have been.",
        labels=["model"],
    )
    batches = CounterMetricFamily(
        "umad_serve_batches",
        "Batches by why they began: a bound was reached, all were there, the window was over, or "
        "the others come apart.",
        labels=["model", "why"],
    )
    growing = GaugeMetricFamily(
        "umad_serve_generating", "Answers that are being generated now.", labels=["model"]
    )
    prompts = CounterMetricFamily(
        "umad_serve_prompt_tokens",
        "Tokens of the prompts of answers that grew together.",
        labels=["model"],
    )
    cached = CounterMetricFamily(
        "umad_serve_prompt_tokens_cached",
        "Of these, tokens that were not read again, since an earlier prompt began alike.",
        labels=["model"],
    )
    kept = GaugeMetricFamily(
        "umad_serve_prompts_kept_bytes",
        "What a model keeps of prompts, within its quota; it goes before anything is refused.",
        labels=["model"],
    )
    aside = CounterMetricFamily(
        "umad_serve_answers_set_aside",
        "Times that an answer gave way for want of memory, and went on when another had ended.",
        labels=["model"],
    )
    restarts = CounterMetricFamily(
        "umad_serve_turn_restarts",
        "Faults of umad's own in the loop that batches; each cost the requests at work.",
        labels=["model"],
    )
    bounds = [*map(float, ROWS), float("inf")]
    for model, work in shown.items():
        counts = zip(bounds, accumulate(work["rows"]), strict=True)
        buckets = [("+Inf" if le == float("inf") else str(le), count) for le, count in counts]
        rows.add_metric([model], buckets=buckets, sum_value=work["rows_sum"])
        for why in Why:
            batches.add_metric([model, why], work["batches"].get(why, 0))
        growing.add_metric([model], work["growing"])
        prompts.add_metric([model], work["prompt_tokens"])
        cached.add_metric([model], work["cached_tokens"])
        kept.add_metric([model], work["kept_bytes"])
        aside.add_metric([model], work["set_aside"])
        restarts.add_metric([model], work["restarts"])
    yield from (rows, batches, growing, prompts, cached, kept, aside, restarts)
