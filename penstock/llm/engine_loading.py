"""Start an engine: from the message that asks for it to one that is ready. `loading` builds its
parts.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.config import CPU
from penstock.errors import ConfigError, PenstockError
from penstock.llm import messages
from penstock.llm.blocks import BlockPool
from penstock.llm.constrained import ConstrainedSequences
from penstock.llm.engine import Engine
from penstock.llm.pace import StepTimeModel, Targets
from penstock.llm.scheduler import Scheduler, StepLimits
from penstock.llm.speculation import Speculation
from penstock.processes.start import take_part
from penstock.repository import checksums
from penstock.repository.manifest import check_digests
from penstock.sampling_params import SamplingParams
from penstock.system import devices, garbage
from penstock.wire.frames import EngineReady

if TYPE_CHECKING:
    from penstock.llm.grammars import Grammars

log = logging.getLogger("penstock.engine")
# Warm-up prompts that show how long steps take, as shares of the largest step, and output tokens.
PROMPT_SHARES, NUM_LEARNT = (0.1, 0.5, 1.0, 0.25, 1.0), 3


def start_engine(
    message: messages.LoadEngine, set_policy: Callable[[int], str]
) -> tuple[Engine, EngineReady]:
    """Return the engine and the answer to the core. `set_policy` sets how threads wait for each
    other; it is called before torch is loaded."""
    began, settings = time.perf_counter(), message.settings
    if message.version != messages.VERSION:
        text = f"the core speaks version {message.version}, the engine {messages.VERSION}"
        raise ConfigError([text])
    policy = set_policy(settings.num_threads) if settings.device == CPU else ""
    engine, built = load(settings)
    if policy:
        built["wait_policy"] = policy
        log.info("wait policy of threads: %s", policy)
    # The model's objects are permanent; scanning them in every collection would delay steps.
    garbage.freeze()
    take_part()
    num_blocks, max_length = engine.scheduler.pool.num_blocks, engine.scheduler.limits.max_length
    load_s, vocabulary = time.perf_counter() - began, int(built["vocabulary"])
    ready = EngineReady(messages.VERSION, load_s, num_blocks, max_length, vocabulary, built)
    return engine, ready


def load(settings: messages.EngineSettings) -> tuple[Engine, dict[str, str]]:
    """Return an engine that is ready, and facts about how it was built. File digests are checked
    while torch is imported, before the files are used."""
    settings = msgspec.structs.replace(settings, device=devices.claim(settings.device))
    with ThreadPoolExecutor(1) as pool:
        folders = [Path(settings.manifest).parent] if settings.manifest else []
        checked = [pool.submit(check_digests, folder) for folder in folders]
        checked.append(pool.submit(checksums.check, settings.checksums))
        import torch

        # Raises what was found.
        for each in checked:
            each.result()

    from penstock.llm import dtype_choice, loading

    torch.set_num_threads(settings.num_threads)
    choice = dtype_choice.choose(settings, loading.open_decoder)
    settings, decoder = choice.settings, choice.decoder
    if choice.reason:
        log.info("dtype: %s", choice.reason)
    shape = decoder.shape
    max_length = min(settings.max_length, shape.max_length)
    limits = StepLimits(settings.max_sequences, settings.max_tokens, max_length)
    cache = loading.room(settings, decoder, limits)
    blocks = BlockPool(cache.num_blocks, cache.block_size)
    pace = StepTimeModel(Targets(settings.ttft_s, settings.tpot_s))
    speculation = Speculation(settings.max_drafted, pace) if settings.max_drafted else None
    has_ttft = settings.ttft_s is not None
    scheduler = Scheduler(blocks, limits, shares_prompts=has_ttft, speculation=speculation)
    runner, facts = loading.open_runner(settings, decoder, cache, limits)
    clock = time.monotonic
    engine = Engine(scheduler, runner, pace, clock, settings.max_waiting, runner.num_ahead)
    grammars = partial(open_grammars, settings)
    engine.constrained = ConstrainedSequences(grammars, settings.num_threads)
    if has_ttft:
        learn_pace(engine)
    # Without the tokens of warm-ups.
    engine.read_expert_load = loading.expert_load(decoder).take
    built = {
        "torch": str(torch.__version__),
        "device": settings.device,
        "dtype": settings.dtype,
        "parameters": str(shape.num_parameters),
        "vocabulary": str(shape.vocabulary),
        "cache_bytes": str(cache.keys.nbytes + cache.values.nbytes),
        **facts,
    }
    return engine, built


def open_grammars(settings: messages.EngineSettings) -> Grammars:
    """Return the grammars for the model's tokens."""
    from penstock.llm.grammars import Grammars
    from penstock.llm.text_files import read_text

    text = read_text(settings.path, is_made_up=settings.is_made_up)
    return Grammars(text.vocabulary, partial(text.encode, is_whole=False))


def learn_pace(engine: Engine) -> None:
    """Run prompts of several sizes, so that admission of the first requests uses measured times."""
    limits, pool = engine.scheduler.limits, engine.scheduler.pool
    targets, engine.pace.targets = engine.pace.targets, Targets()
    for number, share in enumerate(PROMPT_SHARES):
        size = max(1, min(int(limits.max_tokens * share), limits.max_length - NUM_LEARNT))
        params = SamplingParams(max_tokens=NUM_LEARNT, cache_salt=f"{number}")
        request = messages.GenerateRequest(-1 - number, messages.pack_tokens([0] * size), params)
        with contextlib.suppress(PenstockError):  # The cache may be too small for the prompt.
            engine.add(request)
        while not engine.is_idle:
            engine.step()
    engine.pace.targets = targets
    engine.scheduler.num_computed = pool.num_asked = pool.num_found = 0
    engine.scheduler.num_drafted = engine.scheduler.num_accepted = 0
    engine.scheduler.take_waits()
