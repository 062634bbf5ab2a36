"""What a shard does with a round's gradient: the update rules of torch's optimizers, and two for local steps.

A rule never looks at more than one value at a time. So it does not matter how parameters
are cut into shards, buckets or parts, nor how many threads work on them: the bits are the
same. They are the same on every machine too: all arithmetic on vectors is float32 in a
fixed order, no multiply fused with an add; factors that come from hyperparameters are worked out in
float64 and rounded once, with nothing in them but `+ - * /` and a square root, which
IEEE 754 defines to the bit. `**` is not among them: libraries differ in its last bit.

`apply` is `params += update`, bit for bit: a shard that sends updates and one that
keeps parameters agree.

Operations come in the order of torch's plain implementation (one tensor, not fused), and
results agree within rounding. AdamW's decay is part of the update here, where torch scales the
parameters before it. Dampening is left out in step 1; torch leaves it out in the first
step that has a momentum, which is another one if momentum is 0 at first.

The loops are compiled: one pass over memory each, without the GIL. Each rule is one template, compiled
twice: once it writes what is to be added over the gradient, once it adds it. Both come from the
same lines and cannot disagree.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from shoestring.codec.base import FLOAT32_MAX, Vector
from shoestring.compiled.jit import Kernel, making_jit, specialise
from shoestring.errors import RuleError
from shoestring.model.rules import Rule

# Sums that `sum_squares` runs side by side, in 8 KiB: enough to hide the latency of adding.
LANES = 1024

# Stand for whether a template adds the update to `params`, and keeps `highest` (`specialise`).
adds = is_amsgrad = False


def _sgd(params, gradient, scale, decay, rate):
    for i in range(gradient.size):
        g = scale * gradient[i]
        if decay != 0:
            g += decay * params[i]
        u = rate * g
        if adds:
            params[i] += u
        else:
            gradient[i] = u


def _momentum(params, gradient, buffer, is_nesterov, scale, decay, momentum, share, rate):
    for i in range(gradient.size):
        g = scale * gradient[i]
        if decay != 0:
            g += decay * params[i]
        b = momentum * buffer[i] + share * g
        buffer[i] = b
        if is_nesterov:
            u = rate * (g + momentum * b)
        else:
            u = rate * b
        if adds:
            params[i] += u
        else:
            gradient[i] = u


def _adam(
    params,
    gradient,
    mean,
    square,
    highest,
    scale,
    coupled,
    decoupled,
    share1,
    beta2,
    share2,
    correction,
    eps,
    rate,
):
    """`coupled` decay goes into the gradient (Adam), `decoupled` straight into the update (AdamW).

    `highest` is touched by amsgrad alone.
    """
    for i in range(gradient.size):
        p = params[i]
        g = scale * gradient[i]
        if coupled != 0:
            g += coupled * p
        m = mean[i] + share1 * (g - mean[i])
        v = beta2 * square[i] + share2 * g * g
        mean[i] = m
        square[i] = v
        if is_amsgrad:
            v = max(highest[i], v)
            highest[i] = v
        u = rate * m / (math.sqrt(v) / correction + eps)
        if decoupled != 0:
            u += decoupled * p
        if adds:
            params[i] = p + u
        else:
            gradient[i] = u


@making_jit
def _sum_squares(vector, scale):
    sums = np.zeros(LANES, np.float64)
    whole = vector.size - vector.size % LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            x = np.float64(scale * vector[start + lane])
            sums[lane] += x * x  # exact: a float64 holds the square of any float32
    for lane in range(vector.size - whole):
        x = np.float64(scale * vector[whole + lane])
        sums[lane] += x * x
    width = LANES
    while width > 1:
        width //= 2
        for lane in range(width):
            sums[lane] += sums[width + lane]
    return sums[0]


def _both(template: Kernel, name: str, **constants: bool) -> tuple[Kernel, Kernel]:
    """What gives the update, and what adds it."""
    update = specialise(making_jit, template, f"{name}_update", adds=False, **constants)
    return update, specialise(making_jit, template, f"{name}_apply", adds=True, **constants)


SGD = _both(_sgd, "sgd")
MOMENTUM = _both(_momentum, "momentum")
ADAM = _both(_adam, "adam", is_amsgrad=False)
AMSGRAD = _both(_adam, "amsgrad", is_amsgrad=True)


def _run(
    adds: bool,
    rule: Rule,
    hyper: Sequence[float],
    params: Vector,
    gradient: Vector,
    state: Mapping[str, Vector],
    step: int,
    scale: float = 1.0,
) -> None:
    """Advance `state`, and give what must be added to `params`: in `gradient`, or added already.

    `step` counts from 1 and includes this update; in step 1 it does not matter what `state`
    held before. `scale` multiplies the gradient first. After a `RuleError` nothing has changed.
    """
    buffers = _check(rule, hyper, params, gradient, state, step, adds)
    signed = -scale if rule.maximize or rule.kind == "outer_nesterov" else scale
    factors: tuple[float, ...]
    arguments: Sequence[Vector | bool]
    if rule.kind == "average":
        kernel, arguments, factors = SGD, [], (0.0, 1.0)
    elif rule.kind in ("adam", "adamw"):
        kernel = AMSGRAD if rule.amsgrad else ADAM
        arguments = [*buffers, buffers[-1]][:3]  # without amsgrad the third is not looked at
        factors = _adam_factors(rule, step, *hyper)
    else:
        lr, momentum, *others = hyper
        dampening, weight_decay = others or (0.0, 0.0)
        if rule.kind == "sgd" and momentum == 0:  # as in torch, the buffer stays as it is
            kernel, arguments, factors = SGD, [], (weight_decay, -lr)
        elif not buffers:
            raise RuleError(
                f"`momentum` is {momentum}, but the rule keeps no momentum",
                hint="give the optimizer a momentum before it is wrapped",
            )
        else:
            is_nesterov = rule.nesterov or rule.kind == "outer_nesterov"
            kernel, arguments = MOMENTUM, [*buffers, is_nesterov]
            share = 1.0 if step == 1 else 1.0 - dampening
            factors = (weight_decay, momentum, share, -lr)
    rounded = _round((signed, *factors))

    if step == 1:
        for buffer in buffers:
            buffer.fill(0)
    kernel[adds](params, gradient, *arguments, *rounded)


update = partial(_run, False)  # overwrites `gradient` with what must be added; leaves `params` alone
apply = partial(_run, True)  # adds that to `params`; what `gradient` holds afterwards is undefined


def sum_squares(vector: Vector, scale: float = 1.0) -> float:
    """Sum the squares of float32(`vector` * `scale`) in float64, in an order fixed by the length.

    Value i is added to sum i mod 1024, in turn; then the upper half of the sums is added to
    the lower half, value by value, until one is left. Sums of pieces do not add up to the bits
    of the whole: for a norm that does not depend on the number of shards, cut where the model
    says, not where a shard ends.
    """
    _check_vector("vector", vector, vector.size, is_written=False)
    return float(_sum_squares(vector, *_round([scale])))


def _adam_factors(
    rule: Rule, step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> tuple[float, ...]:
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= beta < 1:
            raise RuleError(f"`{name}` is {beta}", hint="give 0 or more, and less than 1")
    coupled, decoupled = (weight_decay, 0.0) if rule.kind == "adam" else (0.0, -lr * weight_decay)
    correction = math.sqrt(1 - _power(beta2, step))
    rate = -(lr / (1 - _power(beta1, step)))
    return coupled, decoupled, 1 - beta1, beta2, 1 - beta2, correction, eps, rate


def _power(base: float, exponent: int) -> float:
    """`base ** exponent` by squaring: the same bits everywhere, and as near as a bias correction needs."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _round(factors: Sequence[float]) -> list[np.float32]:
    if not all(abs(factor) <= FLOAT32_MAX for factor in factors):
        raise RuleError(
            "hyperparameters or the gradient's scale lead to a factor that is no finite float32",
            hint="check the learning rate and its schedule",
        )
    return [np.float32(factor) for factor in factors]


def _check(
    rule: Rule,
    hyper: Sequence[float],
    params: Vector,
    gradient: Vector,
    state: Mapping[str, Vector],
    step: int,
    adds: bool,
) -> list[Vector]:
    """Return the rule's state vectors in order, or raise `RuleError`."""
    _check_vector("params", params, params.size, is_written=adds)
    _check_vector("gradient", gradient, params.size, is_written=not adds)
    missing = [name for name in rule.state_names if name not in state]
    if missing:
        raise RuleError(
            f"state `{missing[0]}` of update rule `{rule.kind}` is missing",
            hint=f"give a vector for each of {', '.join(rule.state_names)}",
        )
    buffers = [state[name] for name in rule.state_names]
    for name, buffer in zip(rule.state_names, buffers, strict=True):
        _check_vector(name, buffer, params.size, is_written=True)
    if step < 1:
        raise RuleError(f"step {step} of an update rule", hint="count steps from 1")
    if len(hyper) != len(rule.hyper_names):
        raise RuleError(
            f"update rule `{rule.kind}` got {len(hyper)} hyperparameters",
            hint=f"give {', '.join(rule.hyper_names) or 'none'}",
        )
    return buffers


def _check_vector(name: str, vector: Vector, size: int, *, is_written: bool) -> None:
    if vector.dtype != np.float32 or vector.ndim != 1 or not vector.flags.c_contiguous:
        raise RuleError(
            f"`{name}` is {vector.dtype} with shape {vector.shape}, expected one contiguous float32 vector",
            hint="flatten it and convert it to float32 first",
        )
    if vector.size != size:
        raise RuleError(
            f"`{name}` has {vector.size} values, but `params` has {size}",
            hint="cut parameters, gradient and state at the same places",
        )
    if is_written and not vector.flags.writeable:
        raise RuleError(f"`{name}` is read-only", hint="give a writable float32 vector")
