"""Private names of Lightning that `strategy` needs, each with its reason. Tried on 2.6.6; tests/test_strategy.py is the contract."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from lightning_ntp.strategy.resume import EpochCounts
from lightning_ntp.strategy.streams import length_of


def results_of(trainer: Any) -> Any:
    """The metrics that ``self.log`` fills in the loop that is running; None outside of loops.

    There is no public way to say that a logged value belongs to a micro-batch of another size, or to none at all.
    """
    return trainer._results


def training_results(trainer: Any) -> Any:
    """The metrics that ``self.log`` fills in training, whichever loop runs."""
    return trainer.fit_loop.epoch_loop._results


def evaluation_results(loop: Any) -> Any:
    """The metrics that ``self.log`` fills in an evaluation loop; empty for prediction, which logs nothing."""
    results = getattr(loop, "_results", None)
    return {} if results is None else results


def optimizer_progress(trainer: Any) -> Any:
    """Lightning's counters of steps and of zeroed gradients."""
    return trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress


def hook_name(module: Any) -> str | None:
    """The hook that runs, for ``self.log``. Lightning does not put it back when a hook raises."""
    name: str | None = module._current_fx_name
    return name


def set_hook_name(module: Any, name: str | None) -> None:
    """Put `hook_name` back."""
    module._current_fx_name = name


@contextmanager
def as_training(trainer: Any) -> Iterator[None]:
    """Training is the running stage inside, whatever runs."""
    stage = trainer.state.stage
    trainer.training = True
    try:
        yield
    finally:
        trainer.state.stage = stage


def training_loaders(trainer: Any) -> Sequence[Any]:
    """The loaders that the fit loop trains from; none before it has asked for them."""
    combined = trainer.fit_loop._combined_loader
    return () if combined is None else combined.flattened


def next_training_batch(trainer: Any) -> int:
    """Number in the epoch of the loop batch that the fit loop fetches next; 0 at the end of an epoch."""
    loop = trainer.fit_loop.epoch_loop
    return 0 if loop._num_ready_batches_reached() else loop.batch_progress.current.ready


def replace_training_loaders(trainer: Any, loaders: Sequence[Any], start_at: int) -> None:
    """Let the fit loop go on with other loaders, which begin at loop batch `start_at` of its epoch."""
    combined, fetcher = trainer.fit_loop._combined_loader, trainer.fit_loop._data_fetcher
    combined.reset()
    combined.flattened = list(loaders)
    for loader in loaders:
        loader.set_epoch(trainer.fit_loop.epoch_progress.current.processed)
    fit_length(trainer)
    if fetcher is not None:
        iter(fetcher)
        fetcher.fetched += start_at


def fit_length(trainer: Any) -> None:
    """Let the fit loop know how long the pass is that its loaders are about to begin: loop batches may have changed their size.

    As `_FitLoop.setup_data` works it out once at the start.
    """
    loop, combined = trainer.fit_loop, trainer.fit_loop._combined_loader
    if combined is None or combined.limits is None:
        return
    lengths = [length_of(loader) for loader in combined.flattened]
    wanted, limit = [float("inf") if length is None else length for length in lengths], trainer.limit_train_batches
    if isinstance(limit, float):
        combined.limits = [one if one == float("inf") else int(one * limit) for one in wanted]
    else:
        combined.limits = [min(one, limit) for one in wanted]
    loop.max_batches = max(combined.limits)
    timed = getattr(trainer, "_val_check_time_interval", None) is not None
    if loop.max_batches != float("inf") and not timed and isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))


def next_batch(trainer: Any) -> Any:
    """The next batch of the fit loop, as it hands it to ``batch_to_device``."""
    fetcher = trainer.fit_loop._data_fetcher
    batch, _, _ = next(fetcher)
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = fetcher.done  # as before, unless batches have another size now
    batch = trainer.precision_plugin.convert_input(batch)
    return trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """Everything that Lightning puts into a checkpoint, without writing one."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint


def resume_from(trainer: Any, source: Any) -> None:
    """Let the fit that begins resume from `source`, whatever path the user gave."""
    connector = trainer._checkpoint_connector
    original = type(connector)._restore_modules_and_callbacks
    connector._restore_modules_and_callbacks = lambda *_, **__: original(connector, source)


def guard_prepare_data(trainer: Any, run: Callable[[Callable[[], None]], None]) -> None:
    """Let `run` call the part of a fit's start in which Lightning makes groups of its own and waits for downloads."""
    connector = trainer._data_connector
    original = type(connector).prepare_data
    connector.prepare_data = lambda: run(lambda: original(connector))


def evaluation_loops(trainer: Any) -> tuple[Any, ...]:
    """All loops that evaluate or predict."""
    return (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)


def forget_evaluation_loaders(trainer: Any) -> None:
    """Let evaluation loops ask for their loaders again: data rows have changed."""
    for loop in evaluation_loops(trainer):
        loop._combined_loader = None


DEFERRED = object()
"""What the first half of an evaluation returns where the second one is due."""


def halves_of_run(loop: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """An evaluation loop's ``run`` in two: the pass over the data, and the hooks at its end.

    The first half returns `DEFERRED`, or what ``run`` returns when there is nothing to evaluate.
    """
    kind = type(loop)
    without_gradients = vars(sys.modules[kind.__module__])["_no_grad_context"]

    def first() -> Any:
        loop.on_run_end = lambda: DEFERRED
        try:
            return kind.run(loop)
        finally:
            del loop.on_run_end

    return first, lambda: without_gradients(kind.on_run_end)(loop)


def take_sigterm(trainer: Any, request_leave: Callable[[str], None]) -> None:
    """SIGTERM and SIGUSR1 ask for a planned leave.

    Lightning would broadcast a flag before every batch and swallow errors, so that a dead peer is hidden or hangs everybody.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    connector = trainer._signal_connector

    def note(signum: int, frame: Any) -> None:
        request_leave(signal.Signals(signum).name)

    connector._sigterm_notifier_fn = note  # it would start a collective in the middle of whatever runs
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, note)


@contextmanager
def synced_by(results: Any, reduce: Callable[..., Any] | None) -> Iterator[None]:
    """Inside, ``self.log`` syncs by `reduce` where it is given; Lightning hands over ``strategy.reduce``, which users call as well."""
    if reduce is None:
        yield
        return
    log = results.log
    results.log = lambda *args, **options: log(*args, **(options | {"sync_dist_fn": reduce}))
    try:
        yield
    finally:
        del results.log


def keep_samplers(trainer: Any) -> None:
    """Without this Lightning puts its DistributedSampler in place of the user's sampler, whose order is then lost."""
    trainer._accelerator_connector.use_distributed_sampler = False


def syncs_batch_norm(trainer: Any) -> bool:
    """Whether ``Trainer(sync_batchnorm=True)`` was asked for; Lightning tells strategies that have the attribute only."""
    return trainer._accelerator_connector._layer_sync is not None


def take_compiler(module: Any) -> Callable[[Any], Any] | None:
    """What ``torch.compile(module)`` would compile with, for a module that Lightning got compiled; its steps run as written again.

    Lightning compiles whole steps, and refuses strategies that it does not know; see `compile_roots`.
    """
    context = getattr(module, "_compiler_ctx", None)
    if context is None:
        return None
    for hook in ("forward", "training_step", "validation_step", "test_step", "predict_step"):
        setattr(module, hook, context[f"original_{hook}"])
    module._compiler_ctx = None
    return cast(Callable[[Any], Any], context["dynamo_ctx"])


def ends_window(trainer: Any) -> bool:
    """Whether the loop batch that is running is the last one of an optimizer step."""
    return not trainer.fit_loop._should_accumulate()


def is_last_of_epoch(trainer: Any) -> bool:
    """Whether the loop batch that is running is the last one of the epoch."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def epoch_counts(trainer: Any) -> EpochCounts:
    """Where the fit loop stands. No public property tells a begun batch from a finished one."""
    fit, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress.current
    return EpochCounts(
        fit.ready,
        fit.started,
        fit.processed,
        batches.ready,
        batches.processed,
        batches.completed,
        is_last_of_epoch(trainer),
        trainer.accumulate_grad_batches,
    )


def shift_batches(trainer: Any, shift: int) -> None:
    """Renumber the loop batch that a resumed epoch begins with."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + shift)


def begin_epoch_anew(trainer: Any) -> None:
    """A fit loop resumed at the first batch of an epoch starts it as any other: it would count a step and skip a validation."""
    loop = trainer.fit_loop.epoch_loop
    if loop.restarting and loop.batch_progress.current.processed == 0:
        loop.restarting = False


def run_after_closure(plugin: Any, module: Any, optimizer: Any) -> None:
    """The hooks between backward and the update, with the clipping that the Trainer was asked for."""
    plugin._after_closure(module, optimizer)


@contextmanager
def inside_hook(module: Any, name: str) -> Iterator[None]:
    """Lets ``self.log`` know which hook of the module runs: needed for micro-batches that Lightning does not see."""
    before, module._current_fx_name = module._current_fx_name, name
    try:
        yield
    finally:
        module._current_fx_name = before


def transfer_each(module: Any, apply: Callable[[Any, Callable[[Any], Any]], Any]) -> None:
    """Let ``on_before_batch_transfer`` see the user's batches one by one: Lightning calls it before the strategy is asked."""
    original = type(module)._on_before_batch_transfer

    def per_micro_batch(batch: Any, dataloader_idx: int = 0) -> Any:
        return apply(batch, lambda part: original(module, part, dataloader_idx))

    module._on_before_batch_transfer = per_micro_batch


def stop_transfer_each(module: Any) -> None:
    """Undo `transfer_each`, which leaves something on the module that does not pickle."""
    module.__dict__.pop("_on_before_batch_transfer", None)


def metric_cache(metric: Any) -> Any:
    """The on-step value of a logged metric."""
    return metric._forward_cache


def set_metric_cache(metric: Any, value: Any) -> None:
    """Replace the on-step value of a logged metric."""
    metric._forward_cache = value


def metric_defaults(metric: Any) -> dict[str, Any]:
    """The states of a torchmetrics metric as they were before any update."""
    return metric._defaults


def metric_reductions(metric: Any) -> dict[str, Any]:
    """For each state of a torchmetrics metric the function that joins those of several processes."""
    return metric._reductions


def on_first_log(results: Any, act: Callable[[str, Any], None]) -> None:
    """Call `act` with key and metric whenever a value is logged for the first time, before it is added to.

    Lightning makes the metric of a logged value when ``self.log`` is called, and offers no way to let it begin with a sum.
    """
    kind = type(results)

    def register(self: Any, key: str, metric: Any) -> None:
        kind.__setitem__(self, key, metric)
        self.act(key, metric)

    results.__class__ = type(kind.__name__, (kind,), {"__setitem__": register})
    results.act = act


def before_clearing(results: Any, act: Callable[[], None]) -> None:
    """Call `act` before logged values are cleared: Lightning does it at an epoch's end, ahead of the last hooks that may save."""
    kind = type(results)

    def reset(*args: Any, **options: Any) -> None:
        act()
        kind.reset(results, *args, **options)

    results.reset = reset


def stop_watching(results: Any) -> None:
    """Undo `on_first_log` and `before_clearing`."""
    results.__dict__.pop("reset", None)
    if hasattr(results, "act"):
        del results.act
        results.__class__ = type(results).__mro__[1]


class AverageOf:
    """A WeightAveraging callback whose average is ours to keep. Its methods are replaced on the instance, and its copy's parameters.

    It would copy a sharded module, swap weights once more when a validation is begun anew, and save the average in place of the
    weights.
    """

    def __init__(self, callback: Any) -> None:
        self.callback, self._swapped = callback, False

    @property
    def num_averaged(self) -> int:
        """Updates that the average has seen."""
        return int(self.callback._average_model.n_averaged)

    def take_over(self, before: Callable[[], None], updated: Callable[[], None]) -> None:
        """Let `before` run before the callback touches weights, and `updated` after each update of the average."""
        callback, average = self.callback, self.callback._average_model
        swap, copy_back, update = callback._swap_models, callback._copy_average_to_current, average.update_parameters

        def update_parameters(model: Any) -> None:
            before()
            update(model)
            updated()

        def exchange(module: Any, wanted: bool) -> None:
            if self._swapped is not wanted:
                before()
                swap(module)
                self._swapped = wanted

        def finish(trainer: Any, module: Any) -> None:
            before()
            copy_back(module)

        average.update_parameters = update_parameters
        callback.on_validation_epoch_start = lambda trainer, module: exchange(module, True)
        callback.on_validation_epoch_end = lambda trainer, module: exchange(module, False)
        callback.on_train_end = finish
        callback.on_save_checkpoint = callback.on_load_checkpoint = lambda *_: None

    def show(self, cells: Mapping[str, torch.Tensor], num_averaged: int) -> None:
        """The callback's copy holds these tensors from now on, by the names of the module's parameters."""
        average = self.callback._average_model
        named = dict(average.module.named_parameters(remove_duplicate=False))
        owners: dict[int, list[tuple[Any, str]]] = {}
        for name, parameter in named.items():
            owner, _, own = name.rpartition(".")
            owners.setdefault(id(parameter), []).append((average.module.get_submodule(owner), own))
        for name, cell in cells.items():
            shared = torch.nn.Parameter(cell, requires_grad=False)
            for owner, own in owners[id(named[name])]:
                setattr(owner, own, shared)
        average.n_averaged.fill_(num_averaged)


def averages_of(trainer: Any) -> list[AverageOf]:
    """The WeightAveraging callbacks of a Trainer."""
    kinds = [callback for callback in trainer.callbacks if "WeightAveraging" in {cls.__name__ for cls in type(callback).__mro__}]
    return [AverageOf(callback) for callback in kinds]
