"""The slider of a workload's sample size: a sequence length, or the size of images.

It is no setting of `StepConfig`: a workload in another size is another workload.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets

from memlab._panel import guide
from memlab._panel.controls import SliderRow, close
from memlab.workload import SampleSize


class SizeRow(SliderRow):
    """A slider with one position for each size that a workload offers; any size can be typed.

    The row is hidden for a workload with samples of one size only.
    """

    def __init__(
        self,
        changed: Callable[[], None],
        submit: Callable[[], None],
        apply: Callable[[Mapping[str, object]], None],
    ) -> None:
        self._offered: tuple[int, ...] = ()  # until a workload offers some
        slider = widgets.IntSlider(min=0, max=1, readout=False)
        super().__init__(slider, int, changed, submit, apply)
        self.name("Sample size", "")
        self.offer(None)

    def offer(self, size: SampleSize | None) -> None:
        """Offer the sizes of a workload and show its own; None for one of one size only."""
        self.row.layout.display = "none" if size is None else ""
        if size is None:
            return

        label = size.name[:1].upper() + size.name[1:]
        self.name(label, guide.tooltip("sample_size"))
        if self._offered != size.offered:
            self._offered = size.offered
            self._renew(size)
        self.value = size.value
        self.slider.value = self._nearest(size.value)  # also if the box shows this already

    def _renew(self, size: SampleSize) -> None:
        """Put another slider in the place of the one that was there.

        A page that is told of another number of positions may move the handle of a slider within
        the old ones, and send that back as if a person had moved it.
        """
        former, last = self.slider, len(size.offered) - 1
        made = widgets.IntSlider(min=0, max=last, value=self._nearest(size.value), readout=False)
        self.slider = self.used(made)
        self.say_positions(size.offered)
        self.row.children = [self.slider, *self.row.children[1:]]
        close(former)

    def _number(self, position: float) -> float:
        return self._offered[round(position)]

    def _nearest(self, number: Any) -> float | None:
        if not isinstance(number, int) or not self._offered:
            return None

        def distance(position: int) -> float:
            return abs(math.log(self._offered[position]) - math.log(max(number, 1)))

        return min(range(len(self._offered)), key=distance)
