"""Pictures of results (`StepResult`, `Snapshot`, `GraphTable` and others) as matplotlib figures.

Figures belong to nobody but the caller: no pyplot, no global state, so they can be drawn in any
thread. Sizes on an axis are bytes in the data and binary units in the tick labels. Colours are
never alone: order, labels, hatches and markers say the same. Each picture is a file in `figures/`;
how they look and are exported is in `figures/look.py`.

>>> import memlab
>>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
>>> result = memlab.recorded(workload, memlab.StepConfig(batch_size=4), "amd-epyc")
>>> memlab.plots.to_png(memlab.plots.peak_bar(result))[1:4]
b'PNG'
"""

from memlab.figures.look import CATEGORY_COLORS, CATEGORY_LABELS, placeholder, to_png, to_svg
from memlab.figures.peak import peak_bar, peak_map, rank_peaks, rank_timelines
from memlab.figures.runs import heat_map, memory_against_time, scaling, step_times, varying_fields
from memlab.figures.searches import cost_changes, lengths, recommendations, run, waterfall
from memlab.figures.snapshots import (
    replay,
    snapshot_comparison,
    snapshot_fragmentation,
    snapshot_growth,
    snapshot_peak,
    snapshot_timeline,
)
from memlab.figures.step_graph import step_graph
from memlab.figures.timeline import run_timeline, timeline

__all__ = [
    "CATEGORY_COLORS",
    "CATEGORY_LABELS",
    "cost_changes",
    "heat_map",
    "lengths",
    "memory_against_time",
    "peak_bar",
    "peak_map",
    "placeholder",
    "rank_peaks",
    "rank_timelines",
    "recommendations",
    "replay",
    "run",
    "run_timeline",
    "scaling",
    "snapshot_comparison",
    "snapshot_fragmentation",
    "snapshot_growth",
    "snapshot_peak",
    "snapshot_timeline",
    "step_graph",
    "step_times",
    "timeline",
    "to_png",
    "to_svg",
    "varying_fields",
    "waterfall",
]
