"""Rejection sampling of chains: the law of whole blocks is the target's own, in closed form."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from toy_target import ToyTarget, toy_runtime

from spot_deploy import SpotDeployError
from spot_deploy.runtime.decode import DecodeOptions
from spot_deploy.runtime.head import Head, summarise
from spot_deploy.runtime.noise import Noise
from spot_deploy.runtime.rejection import commit_law


def head_of(logits, temperature, raw):
    top, ids, rest, rest_raw = summarise(logits, 1 / temperature, 3)
    return Head(np.arange(len(logits)), top, ids, rest, rest_raw if raw else None, 1 / temperature, lambda m: logits[m])


def enumerated_law(logits, temperature, raw):
    """By all joint draws of a token at every position."""

    def softmax(x):
        return np.exp(x) / np.exp(x).sum(1, keepdims=True)

    p = softmax(logits.astype(np.float64) / temperature)
    confidence = softmax(logits.astype(np.float64)) if raw else p
    law, rows = np.zeros_like(p), np.arange(len(p))
    for drawn in itertools.product(range(p.shape[1]), repeat=len(p)):
        winner = int(confidence[rows, drawn].argmax())  # the lowest position on ties
        law[winner, drawn[winner]] += p[rows, drawn].prod()
    return law


@pytest.mark.parametrize("raw", [False, True], ids=["tempered", "raw"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_the_law_of_a_commit_is_that_of_enumeration(temperature, raw):
    rng = np.random.default_rng(0)
    for ties in (False, True):
        logits = rng.normal(size=(4, 6)).astype(np.float32) * 2
        if ties:
            logits[2] = logits[1]
            logits[0, :3] = 1.0
        law = commit_law(head_of(logits, temperature, raw))
        np.testing.assert_allclose(law, enumerated_law(logits, temperature, raw), atol=1e-12)


def block_law(target, prompt, temperature):
    """Probability of every final block, by all orders and tokens."""

    def follow(tokens):
        masked = [i for i, t in enumerate(tokens) if t == target.mask_id]
        if not masked:
            return {tokens: 1.0}
        logits = target.logits(prompt, tokens)[masked]
        law, found = commit_law(head_of(logits, temperature, False)), {}
        for (row, token), p in np.ndenumerate(law):
            if p > 0:
                after = list(tokens)
                after[masked[row]] = token
                for final, q in follow(tuple(after)).items():
                    found[final] = found.get(final, 0.0) + p * q
        return found

    return follow((target.mask_id,) * target.width)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_the_law_of_a_block_is_the_targets_own(temperature):
    target = ToyTarget(width=3, vocab=4, mask_id=3, head_width=2, scale=1.0, coupling=0.8)
    runtime = toy_runtime(target)
    prompt, draws = [1, 2, 0], 4000
    law = block_law(target, prompt, temperature)
    counts = dict.fromkeys(itertools.product(range(3), repeat=3), 0)
    accepted = 0
    options = DecodeOptions(max_new_tokens=3, ignore_eos=True, temperature=temperature, budget=2, verifier="rejection")
    for seed in range(draws):
        result = runtime.generate(prompt, options, seed=seed)
        counts[tuple(result.token_ids)] += 1
        accepted += result.accepted
        assert result.nfe + result.accepted == result.commits == 3
    assert accepted > draws / 10
    p = np.array([law[block] for block in counts])
    np.testing.assert_allclose(p.sum(), 1, atol=1e-9)
    seen = np.array(list(counts.values())) / draws
    # What sampling alone gives, and four of its standard deviations.
    floor = 0.5 * np.sqrt(2 * p * (1 - p) / (np.pi * draws)).sum()
    spread = 0.5 * np.sqrt((p * (1 - p) / draws).sum() * (1 - 2 / np.pi))
    assert 0.5 * np.abs(seen - p).sum() < floor + 4 * spread


def test_results_say_that_only_the_law_is_kept():
    runtime = toy_runtime(ToyTarget())
    result = runtime.generate([1, 2], budget=3, temperature=1.0, verifier="rejection", max_new_tokens=8)
    assert (result.exact, result.lossless) == (True, False)
    assert "in law" in result.exactness
    with pytest.raises(SpotDeployError, match="out of range") as caught:
        DecodeOptions(verifier="rejection")
    assert "above 0" in caught.value.wanted


def test_uniform_numbers_are_addressed_and_uniform():
    noise = Noise(3)
    values = np.array([noise.uniform(b, c, lane) for b in range(20) for c in range(30) for lane in range(3)])
    assert len(set(values.tolist())) == len(values)
    assert noise.uniform(4, 5, 1) == noise.uniform(4, 5, 1) != Noise(3, sample=1).uniform(4, 5, 1)
    assert abs(values.mean() - 0.5) < 0.03
    assert abs(np.histogram(values, 10, (0, 1))[0] / len(values) - 0.1).max() < 0.03
