"""The status line: which run and which settings a sentence belongs to."""

from memlab import StepConfig
from memlab._panel import outlook
from memlab._panel.outlook import Status
from memlab._panel.questions import Question
from memlab._panel.runs import Run
from tests.panel_parts import make_result

RESULT = make_result(config=StepConfig(batch_size=8, precision="bf16-mixed", accumulation_steps=2))
RUN = outlook.of_run(Run(number=2, result=RESULT))
HERE = Question(RESULT.workload_name, RESULT.config, RESULT.device)
ELSEWHERE = Question(RESULT.workload_name, StepConfig(batch_size=16), RESULT.device)


def test_a_run_is_named_with_what_differs_from_the_defaults():
    assert RUN.named(HERE).startswith("run 2, batch 8, accumulation 2, bf16-mixed: ")
    other = Question("another", RESULT.config, "t4")
    assert RUN.named(other).startswith(f"run 2, {RESULT.workload_name}, on {RESULT.device}, batch")


def test_a_run_is_past_once_the_settings_differ():
    assert not RUN.is_past(HERE)
    assert RUN.is_past(ELSEWHERE)
    assert RUN.is_past(None)
    assert "memlab-past" in outlook.as_html(RUN, ELSEWHERE)
    assert "memlab-past" not in outlook.as_html(RUN, HERE)


def test_another_sentence_goes_with_the_settings_unless_a_run_goes_on():
    said = Status(text="an error", question=HERE)
    assert not said.is_past(HERE)
    assert said.is_past(ELSEWHERE)
    assert not Status(text="measuring").is_past(ELSEWHERE)
