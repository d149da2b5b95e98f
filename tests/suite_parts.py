"""What the tests of the suite share with the processes that they start: its smallest case."""

from benchmarks.gpu_suite import cases
from memlab import StepConfig
from memlab.store.records import Kind

TINY = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "sequence_length": 8}


def tiny(kind=Kind.RUN, **fields):
    facts = {"kind": kind, "group": "grid" if kind is Kind.RUN else ""}
    config = StepConfig(**({"batch_size": 2} | fields))
    return cases.Case(workload="gpt-small", options=TINY, config=config, **facts)
