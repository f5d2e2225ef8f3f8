"""What the comparison with transformers calls wrong, and whether its mixes are what they say, with
a tiny model in the place of SmolLM2."""

import math
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import tiny_llm as tiny  # noqa: E402

from penstock.llm.checkpoint import open_checkpoint  # noqa: E402

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 12


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch):
    folders = [ROOT / "benchmarks" / "llm", ROOT / "examples", ROOT / "benchmarks"]
    monkeypatch.setattr(sys, "path", [*map(str, folders), *sys.path])
    import agreement
    import mixes
    import ours

    class Scripts:
        pass

    Scripts.agreement, Scripts.mixes, Scripts.ours = agreement, mixes, ours
    return Scripts


def line(number=0, difference=1e-5, margins=(), mode="alone"):
    others = [{"place": 3, "ours": 1, "theirs": 2, "margin": margin} for margin in margins]
    return {
        "mode": mode, "number": number, "kind": "chat", "generated": [1] * NUM_TOKENS,
        "largest_difference": difference, "mean_difference": difference / 10,
        "largest_logit": 20.0, "others": others,
    }  # fmt: skip


class TestVerdicts:
    def problems(self, scripts, lines):
        agreement = scripts.agreement
        return list(agreement.problems_of("alone", agreement.totals(lines)))

    def test_the_same_is_right(self, scripts):
        assert self.problems(scripts, [line(number) for number in range(20)]) == []

    def test_one_tie_among_twenty_is_right(self, scripts):
        lines = [line(), *(line(number) for number in range(1, 20))]
        lines[0] = line(0, margins=(9e-4,))
        assert self.problems(scripts, lines) == []

    def test_too_many_ties(self, scripts):
        lines = [line(number, margins=(1e-5,) if number < 2 else ()) for number in range(20)]
        (problem,) = self.problems(scripts, lines)
        assert problem == "alone: 90.0% continued identically; expected at least 95%"

    @pytest.mark.parametrize("margin", [1e-3, 2.0, math.nan])
    def test_one_that_is_no_tie(self, scripts, margin):
        lines = [line(number, margins=(margin,) if number == 7 else ()) for number in range(20)]
        (problem,) = self.problems(scripts, lines)
        assert problem.startswith("alone, prompt 7, token 3: ")

    @pytest.mark.parametrize("difference", [6e-4, math.nan])
    def test_one_logit_that_is_far_off(self, scripts, difference):
        lines = [line(number, difference if number == 7 else 1e-5) for number in range(20)]
        (problem,) = self.problems(scripts, lines)
        assert problem.startswith("alone: a logit differs by ")


def test_what_was_found_is_kept_and_a_broken_line_is_not(scripts, tmp_path):
    journal = scripts.agreement.Journal(tmp_path, ["key"], False)
    journal.add([line(0), line(1)])
    journal.add([line(2)])
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:-5])
    again = scripts.agreement.Journal(tmp_path, ["key"], False)
    assert again.has("alone", 1) and not again.has("alone", 2)
    again.add([line(2)])
    assert scripts.agreement.Journal(tmp_path, ["key"], False).has("alone", 2)
    assert not scripts.agreement.Journal(tmp_path, ["another"], False).lines
    assert not scripts.agreement.Journal(tmp_path, ["key"], True).lines


def an_engine(scripts, folder):
    checkpoint = open_checkpoint(folder)
    ours = scripts.ours
    decoder = ours.KeepingDecoder(checkpoint.shape, checkpoint.weight, "cpu", torch.float32)
    checkpoint.close()
    return ours.Ours(decoder, None)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]
)
def test_mixes_say_what_one_alone_says(scripts, tmp_path, seed):
    from smollm2 import Prompt

    weights = tiny.write_folder(tmp_path)
    engine = an_engine(scripts, tmp_path)
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(50, (34,), generator=generator).tolist()
    prompts = {number: Prompt("made up", (*shared[: 4 * number], number)) for number in range(1, 9)}
    mix = scripts.mixes.Mix(engine, prompts, NUM_TOKENS, seed)
    ended = mix.run()
    whole = [each for each in ended if not each.is_given_up]
    assert sorted(each.prompt for each in whole) == sorted(prompts)
    assert len(ended) == 10 and mix.stress.num_given_up == 2
    for each in ended:
        prompt = prompts[each.prompt]
        generated, logits = scripts.mixes.alone(engine, prompt, NUM_TOKENS)
        assert each.generated == generated[: len(each.generated)]
        assert len(each.generated) == len(each.logits)
        known = [*prompt.tokens, *generated[:-1]]
        exact = tiny.by_hand(weights, tiny.CONFIG, known)[-NUM_TOKENS:].float()
        for row, other, right in zip(each.logits, logits, exact, strict=False):
            assert torch.allclose(row, right, atol=1e-3)
            assert torch.allclose(other, right, atol=1e-3)


@pytest.mark.slow
def test_mixes_do_what_they_are_for(scripts, tmp_path):
    from smollm2 import Prompt

    tiny.write_folder(tmp_path)
    engine = an_engine(scripts, tmp_path)
    same = tuple(range(30))
    prompts = {number: Prompt("made up", (*same, number)) for number in range(12)}
    stresses = []
    for seed in range(4):
        mix = scripts.mixes.Mix(engine, prompts, 30, seed)
        mix.run()
        stresses.append(mix.stress)
    for key in scripts.agreement.STRESSES:
        assert sum(getattr(each, key) for each in stresses) > 0, key
