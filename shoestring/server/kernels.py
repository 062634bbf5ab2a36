"""The loops of the update rules, one pass over memory each, without the GIL.

What they compute is defined to the bit: float32 at every step, in the order written here,
no multiply fused with an add, one value never looks at another (but in `sum_squares`,
whose order is fixed). So shards of any kind and number get the same parameters.

Each rule is one template, compiled twice: `update_*` writes what is to be added over the
gradient, `apply_*` adds it. Both come from the same lines and cannot disagree.
"""

import math

import numpy as np

from shoestring.compiled.jit import making_jit, specialise

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


update_sgd = specialise(making_jit, _sgd, "update", adds=False)
apply_sgd = specialise(making_jit, _sgd, "apply", adds=True)
update_momentum = specialise(making_jit, _momentum, "update", adds=False)
apply_momentum = specialise(making_jit, _momentum, "apply", adds=True)
update_adam = specialise(making_jit, _adam, "update", adds=False, is_amsgrad=False)
apply_adam = specialise(making_jit, _adam, "apply", adds=True, is_amsgrad=False)
update_amsgrad = specialise(making_jit, _adam, "amsgrad_update", adds=False, is_amsgrad=True)
apply_amsgrad = specialise(making_jit, _adam, "amsgrad_apply", adds=True, is_amsgrad=True)


@making_jit
def sum_squares(vector, scale):
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
