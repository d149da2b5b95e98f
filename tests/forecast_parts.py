"""What the tests of the panel's predictions share."""

from memlab import StepConfig
from memlab._panel import questions
from memlab._panel.questions import Estimate, How, Question
from memlab.prediction.predict import Prediction
from memlab.result import Source
from tests.panel_parts import PATIENCE_SECONDS, make_result

MIB = 2**20


def question(batch_size=8, steps=1, **changes):
    config = StepConfig(batch_size=batch_size, accumulation_steps=steps)
    return Question(**{"workload_name": "tiny", "config": config, "device": "cpu", **changes})


def predicted(peak=MIB, **changes):
    changes = {"source": Source.PREDICTED, "uncertainty": {"peak_allocated_bytes": 0.1}, **changes}
    return make_result(peak=peak, **changes)


def estimate(result, *, exact=True):
    asked = Question(result.workload_name, result.config, result.device)
    how = How.PREDICTED if exact else How.INTERPOLATED
    return Estimate(question=asked, result=result, exact=exact, how=how)


def answered(found, *questions):
    """Ask one after another, and wait for each answer; a number is a batch size."""
    for asked in questions:
        found.ask(question(asked) if isinstance(asked, int) else asked)
        assert found.wait(PATIENCE_SECONDS)


def sizes(configs):
    return [config.batch_size for config in configs]


def of_estimates(estimates):
    return sizes(one.question.config for one in estimates)


def worker(monkeypatch, answer):
    """Let `answer(config, cancel)` give the result in place of the worker; return the configs."""
    calls = []

    def stand_in(workload, config, device, *, on_progress, cancel):
        calls.append(config)
        return Prediction(result=answer(config, cancel), size_model=None)

    monkeypatch.setattr(questions, "predict_with_size_model", stand_in)
    return calls
