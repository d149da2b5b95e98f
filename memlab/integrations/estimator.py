"""`StepClassifier`: a classifier for scikit-learn whose updates are memlab's training step.

skorch makes a scikit-learn estimator of a PyTorch module: it owns epochs, batches, validation and
prediction. Here each of its updates is the step of a `StepConfig`, so that checkpointing,
accumulation, precision and optimizer are as the config says. Left out: sharded configs, since
scikit-learn runs one process, and skorch's own optimizer, which is not used.
"""

from functools import partial
from typing import Any

import torch

from memlab.config import Sharding, StepConfig
from memlab.errors import UnsupportedError
from memlab.integrations.training_step import TrainingStep, training_step
from memlab.techniques.batches import map_tensors
from memlab.workload import Workload

try:
    from skorch import NeuralNetClassifier
    from skorch.dataset import unpack_data
except ImportError:
    raise UnsupportedError(
        "memlab.integrations.estimator needs skorch, which is not installed; "
        "pip install 'memlab[sklearn]'"
    ) from None


class StepClassifier(NeuralNetClassifier):  # type: ignore[misc]
    """A classifier that trains as a config says; for pipelines, cross-validation and searches.

    Args:
        module: class or function that makes the model, which returns the scores of the classes.
        config: how it is trained; `batch_size` samples an update.
        criterion: the loss, a mean over samples.
        **options: of skorch's `NeuralNetClassifier`, such as `max_epochs` and `module__width`.
            `batch_size`, `optimizer` and `lr` are the config's.

    Attributes:
        step_: the step that trains `module_`, once training has begun. Building it sets the seeds
            of torch, NumPy and `random`.

    Raises:
        UnsupportedError: when training begins, if this device cannot do what the config asks for.

    >>> import numpy as np
    >>> inputs, labels = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
    >>> config = StepConfig(batch_size=4)
    >>> net = StepClassifier(lambda: torch.nn.Linear(4, 2), config, train_split=None, verbose=0)
    >>> net.fit(inputs, labels).predict(inputs).shape
    (4,)
    """

    def __init__(
        self,
        module: Any,
        config: StepConfig,
        *,
        criterion: Any = torch.nn.CrossEntropyLoss,
        **options: Any,
    ) -> None:
        super().__init__(module, criterion=criterion, **options)
        self.config = config

    def initialize(self) -> "StepClassifier":
        """Make the model; the step comes with the first batch."""
        self.batch_size = self.config.batch_size
        self.step_: TrainingStep | None = None
        super().initialize()
        return self

    def initialize_optimizer(self, *_: Any, **__: Any) -> "StepClassifier":
        """Make none: the step has an optimizer."""
        return self

    def on_train_begin(self, net: Any, **given: Any) -> None:
        """Build the step, unless training goes on."""
        super().on_train_begin(net, **given)
        if self.step_ is not None and self.step_.model is self.module_:
            return

        if self.config.sharding is not Sharding.NONE:
            raise UnsupportedError(
                f"sharding={str(self.config.sharding)!r} in a scikit-learn estimator, which is one "
                "process; use sharding='none', or memlab.training_step"
            )
        first = next(
            iter(self.get_iterator(self.get_dataset(given["X"], given["y"]), training=True))
        )
        workload = Workload(
            name=type(self.module_).__name__,
            build_model=partial(_given, self.module_),
            make_batch=partial(_of_size, first),
            compute_loss=self.loss_of,
        )
        self.step_ = training_step(workload, self.config, self.device)

    def loss_of(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the criterion of a batch of inputs and labels."""
        inputs, labels = unpack_data(batch)
        scores = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        loss: torch.Tensor = self.get_loss(scores, labels, X=inputs, training=True)
        return loss

    def train_step(self, batch: Any, **_: Any) -> dict[str, Any]:
        """Make one update, and return its loss."""
        assert self.step_ is not None
        self.module_.train()
        return {"loss": torch.tensor(self.step_(batch)), "y_pred": None}


def _given(module: torch.nn.Module) -> torch.nn.Module:
    return module


def _of_size(batch: Any, num_samples: int) -> Any:
    """Return samples of a batch, again and again if there are too few."""
    return map_tensors(lambda t: t[torch.arange(num_samples) % len(t)], batch)
