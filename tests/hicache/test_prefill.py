"""What computing costs is learnt from steps of all sizes, through noise and change."""

import random

import pytest

from hicache.errors import BadRequest
from hicache.prefill import PrefillCurve, PrefillSpeed

TRUE = PrefillCurve(token_s=22.6e-6, attend_s=0.452e-9, step_s=2e-3)


def learn(speed: PrefillSpeed, curve: PrefillCurve, num_steps: int, *, noise: float = 0.0, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(num_steps):
        start, length = rng.randrange(30_000), rng.choice((16, 64, 256, 512, 512, 2048))
        speed.add(start, start + length, curve.seconds(start, start + length) * rng.uniform(1 - noise, 1 + noise))


def check_close(found: PrefillCurve | None, expected: PrefillCurve, tolerance: float) -> None:
    assert found is not None
    for start, stop in ((0, 512), (0, 2048), (8192, 8704), (28_000, 28_064)):
        assert found.seconds(start, stop) == pytest.approx(expected.seconds(start, stop), rel=tolerance)


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-3), (0.2, 0.1)])
def test_the_curve_is_found(noise: float, tolerance: float) -> None:
    speed = PrefillSpeed()
    assert speed.curve is None
    learn(speed, TRUE, 200, noise=noise)
    check_close(speed.curve, TRUE, tolerance)


def test_a_change_of_the_machine_is_followed() -> None:
    speed = PrefillSpeed()
    learn(speed, TRUE, 100)
    slower = PrefillCurve(token_s=10 * TRUE.token_s, attend_s=10 * TRUE.attend_s, step_s=10 * TRUE.step_s)
    learn(speed, slower, 200, seed=1)
    check_close(speed.curve, slower, 0.1)


def test_one_step_that_hung_moves_little() -> None:
    speed = PrefillSpeed()
    learn(speed, TRUE, 100)
    speed.add(0, 512, 60.0)
    check_close(speed.curve, TRUE, 0.15)


def test_equal_steps_are_explained_by_their_tokens() -> None:
    speed = PrefillSpeed()
    for _ in range(20):
        speed.add(0, 512, 0.01)
    curve = speed.curve
    assert curve is not None
    assert curve.seconds(0, 512) == pytest.approx(0.01, rel=1e-3)
    assert curve.seconds(0, 1024) == pytest.approx(0.02, rel=0.1)


def test_noise_never_makes_a_term_negative() -> None:
    for seed in range(50):
        speed, rng = PrefillSpeed(), random.Random(seed)
        for _ in range(rng.randint(1, 20)):
            start = rng.randrange(1000)
            speed.add(start, start + rng.randint(1, 1000), rng.uniform(1e-4, 1.0))
        curve = speed.curve
        assert curve is not None
        assert min(curve.token_s, curve.attend_s, curve.step_s) >= 0
        assert curve.seconds(0, 1000) > 0


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("start, stop", (5, 5, 1.0)), ("start, stop", (-1, 5, 1.0)), ("seconds", (0, 5, 0.0)),
        ("seconds", (0, 5, float("nan"))), ("seconds", (0, 5, float("inf"))),
    ],
)  # fmt: skip
def test_a_step_that_cannot_be_is_refused(field: str, arguments: tuple[int, int, float]) -> None:
    speed = PrefillSpeed()
    with pytest.raises(BadRequest) as refused:
        speed.add(*arguments)
    assert refused.value.field == field
    assert speed.curve is None


@pytest.mark.parametrize("terms", [{"token_s": -1.0}, {"token_s": 1.0, "step_s": float("nan")}, {"token_s": 0.0}])
def test_a_curve_that_cannot_be_is_refused(terms: dict[str, float]) -> None:
    with pytest.raises(BadRequest, match="PrefillCurve"):
        PrefillCurve(**terms)
