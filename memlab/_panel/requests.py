"""`Requests`: what the worker is asked to predict, in which order.

First what is on screen, then what somebody waits for, and at last what may be on screen next.
"""

from memlab._panel.asked import Asked
from memlab._panel.elsewhere import Elsewhere
from memlab._panel.forecasts import Forecasts
from memlab._panel.keeping import Keeper
from memlab._panel.neighbours import neighbours
from memlab._panel.questions import Estimate, Question
from memlab._panel.runs import RunLog
from memlab._panel.view import View
from memlab.result import Outcome, Source


class Requests:
    """Asks for predictions on behalf of a page.

    Args:
        forecasts: every prediction.
        view: of the panel.
        asked: reads what is on screen.
        log: of the runs.
        keeper: of the predictions that a person keeps.
        elsewhere: fills the table of cards.
    """

    def __init__(
        self,
        forecasts: Forecasts,
        view: View,
        asked: Asked,
        log: RunLog,
        keeper: Keeper,
        elsewhere: Elsewhere,
    ) -> None:
        self._forecasts, self._view, self._asked, self._log = forecasts, view, asked, log
        self._keeper, self._elsewhere = keeper, elsewhere

    def on_screen(self, question: Question, estimate: Estimate | None) -> bool:
        """Have predicted what is on screen, then what it is compared with.

        Returns whether an answer will arrive.
        """
        if estimate is None or not estimate.exact:
            return self._forecasts.ask(question)
        # the saving of recomputation is relative to the plain step
        if question.plain is not None and self._forecasts.ask(question.plain):
            return True
        self._forecasts.ahead([])  # what was next to the settings before
        return False

    def later(self) -> None:
        """Have predicted what is kept, what runs are compared with, and the cards of the table."""
        self._forecasts.ask_later(
            [*self._keeper.questions, *self._of_runs(), *self._elsewhere.questions]
        )

    def ahead(self, question: Question, estimate: Estimate, before: Question | None) -> None:
        """Have the neighbours of what is on screen predicted; `before`: what was shown before."""
        offered = [value for _, value in self._view.controls.precision.options]
        sizes = self._asked.names_by_size
        beside = neighbours(question, offered, before, sizes) if estimate.is_ok else []
        self._forecasts.ahead(beside)

    def _of_runs(self) -> list[Question]:
        """Return the settings of runs that wait for an exact prediction, and give it to the others.

        It may have come with that of another setting.
        """
        waiting = []
        for run in self._log.own:
            if run.prediction is None and run.result.source is Source.MEASURED:
                asked = run.result
                question = Question(asked.workload_name, asked.config, asked.device)
                found = self._forecasts.exact(question)
                if found is None:
                    waiting.append(question)
                elif found.outcome is Outcome.OK:
                    with self._log.lock:
                        self._log.change(run.number, prediction=found)
                        self._view.table.show()
        return waiting
