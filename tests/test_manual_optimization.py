"""A training_step that optimizes by itself, on ragged replicas against one process in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_ntp.errors import UnrecoverableError
from lightning_ntp.strategy.events import CommitEvent, Observer, Observers
from lightning_ntp.strategy.manual import WHY
from lightning_ntp.strategy.recovery import Recovery
from tests import lightning_jobs as jobs
from tests.models import float64_norms, randomize
from tests.test_trainer_features import BATCH, EXACT, SIZE


class Manual(jobs.TinyLlama):
    """Two optimizers, one per half of the model, in one training_step."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        layers = list(self.model.model.layers.parameters())
        others = [p for p in self.parameters() if all(p is not layer for layer in layers)]
        first = torch.optim.SGD(layers, lr=0.1, momentum=0.9)
        second = torch.optim.AdamW(others, lr=1e-2, weight_decay=0.1)
        return [first, second], [torch.optim.lr_scheduler.StepLR(second, 1, gamma=0.5)]

    def noted(self, samples: jobs.Sample, loss: torch.Tensor) -> None:
        self.seen.append(samples["index"].tolist())
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)


class Alternating(Manual):
    """The second loss is that of the updated first half; clipping of one optimizer's gradients; a schedule of its own."""

    def training_step(self, samples: jobs.Sample, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
            loss = self.loss(samples)
            self.manual_backward(loss)
            if optimizer is first:
                self.clip_gradients(first, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
        self.lr_schedulers().step()
        self.noted(samples, loss)


class Accumulating(Manual):
    """Both losses first, then both backward passes; updates after every second batch, one through a closure."""

    def training_step(self, samples: jobs.Sample, batch_idx: int) -> None:
        first, second = self.optimizers()
        once, twice = self.loss(samples), 2 * self.loss(samples)
        self.manual_backward(once)
        if batch_idx % 2:
            second.step(closure=lambda: self.manual_backward(twice))
            first.step()
            first.zero_grad(), second.zero_grad()
        else:
            self.manual_backward(twice)
        self.noted(samples, once)


class Critic(nn.Module):
    """Scores hidden states; part of it is never used, and decays if it gets a gradient of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(24, 5), nn.Tanh(), nn.Linear(5, 1))
        self.unused = nn.Linear(3, 3)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.score(hidden).mean()


class Adversarial(Manual):
    """A generator and a critic with optimizers that are toggled; the critic's gradients outlive the generator's step."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.critic = Critic().double()
        randomize(self.critic)

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2, weight_decay=0.1) for part in (self.model, self.critic)]

    def hidden(self, samples: jobs.Sample) -> Any:
        ids = samples["input_ids"]
        return self.model(input_ids=ids, labels=ids, use_cache=False, output_hidden_states=True)

    def training_step(self, samples: jobs.Sample, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        with critic.toggle_model():
            self.manual_backward(self.critic(self.hidden(samples).hidden_states[-1].detach()))
        with generator.toggle_model():
            output = self.hidden(samples)
            loss = output.loss - self.critic(output.hidden_states[-1])
            self.manual_backward(loss)
            generator.step()
            generator.zero_grad()
        critic.step()
        critic.zero_grad()
        self.noted(samples, loss)


def run_manual(rank: int, world: int, sizes: Any, kind: str) -> Any:
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=sizes)
        module = globals()[kind]()
        trainer = jobs.trainer(strategy, world, max_epochs=2)
        trainer.fit(module, jobs.loader(SIZE, BATCH))
        logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
        return jobs.whole_state(strategy), module.seen, logged, "toggle_optimizer" in vars(module)


@pytest.mark.parametrize(("kind", "sizes"), [
    ("Alternating", [3, 2]), ("Accumulating", [(1, 2), (2, 1)]), ("Adversarial", [3, 1]),
])  # fmt: skip
def test_manual_optimization_equals_one_process(pool, kind, sizes):
    world = sum(size if isinstance(size, int) else size[0] * size[1] for size in sizes)
    results = pool.run(run_manual, world, sizes, kind)
    rows = 3 if kind == "Accumulating" else 2
    module = globals()[kind]()
    with float64_norms():
        trainer = jobs.trainer("auto", 1, max_epochs=2)
        trainer.fit(module, jobs.loader(SIZE, rows * BATCH))
    assert jobs.worst(results[0][0], module) < EXACT
    for _, seen, logged, is_toggle_left in results:
        assert max(map(len, seen)) == BATCH and len(seen) == len(module.seen), "one piece per row and loop batch"
        assert logged["train_epoch"] == pytest.approx(trainer.callback_metrics["train_epoch"].item(), abs=EXACT)
        assert logged["train_step"] == pytest.approx(trainer.callback_metrics["train_step"].item(), abs=EXACT)
        assert not is_toggle_left


def resumed_case(rank: int, world: int, folder: str) -> Any:
    """Two epochs in one go; the second one again from the first one's checkpoint; samples that were committed."""
    with jobs.as_worker(rank, world):
        states, counts = [], Counts()
        for options in ({}, {"ckpt_path": f"{folder}/epoch=0.ckpt"}):
            strategy = jobs.ntp(replica_sizes=[2, 1])
            strategy.observers.add(counts)
            saver = ModelCheckpoint(folder if not options else f"{folder}/again", filename="{epoch}", save_top_k=-1)
            trainer = jobs.trainer(strategy, world, max_epochs=2, callbacks=[saver], enable_checkpointing=True)
            trainer.fit(Alternating(), jobs.loader(SIZE, BATCH), **options)
            states.append(jobs.whole_state(strategy))
        return (*states, counts.samples)


class Counts(Observer):
    """Counts the samples of steps."""

    def __init__(self) -> None:
        self.samples = 0.0

    def on_commit(self, event: CommitEvent) -> None:
        self.samples += event.num_samples


def test_manual_optimization_resumes_and_its_steps_are_counted(pool, tmp_path):
    results = pool.run(resumed_case, 3, str(tmp_path))
    whole, resumed, _ = results[0]
    assert max(float((whole[name] - resumed[name]).abs().max()) for name in whole) < EXACT
    assert [samples for *_, samples in results] == [3 * SIZE] * 3


class Survivor:
    """As much of a member as an error asks for."""

    def __init__(self, somebody_is_lost: bool) -> None:
        self.somebody_is_lost = somebody_is_lost
        self.reported: list[BaseException] = []

    def progress(self, phase: str) -> None:
        pass

    def confirm_loss(self, error: BaseException) -> bool:
        return self.somebody_is_lost

    def report_error(self, error: BaseException) -> None:
        self.reported.append(error)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_loss_in_a_manual_step_ends_the_job_and_says_why(is_lost):
    member: Any = Survivor(is_lost)
    recovery = Recovery(member, Observers())

    def step() -> None:
        raise ConnectionError("closed by peer")

    expected, match = (UnrecoverableError, "a worker was lost: automatic_optimization=False") if is_lost else (ConnectionError, "peer")
    with pytest.raises(expected, match=match):
        recovery.once("step", step, WHY)
    assert len(member.reported) == (0 if is_lost else 1)
