"""What `normalise` does, for batches on the CPU: few passes over memory, without the GIL.

The formulas are those of `normalise.join` and what follows from them, written for one channel
at a time; a test holds one to the other. Sums and statistics are float64.
"""

import math

import numpy as np

from shoestring.compiled.jit import making_sum_jit

AMPLIFICATION, SHIFT = 3.0, 5.0  # see `normalise.py`

# Rows of what `forward` finds and `backward` needs.
MEAN, VARIANCE, JOINT_MEAN, JOINT_VARIANCE = range(4)


@making_sum_jit
def forward(x, weight, bias, others_count, others_mean, others_variance, eps, y, found):
    """Normalise x, [N, C, values], into y."""
    count = x.shape[0] * x.shape[2]
    own = count / (count + others_count)
    sums = np.zeros(x.shape[1])
    for n in range(x.shape[0]):
        for c in range(x.shape[1]):
            row = x[n, c]
            total = 0.0
            for i in range(row.size):
                total += np.float64(row[i])
            sums[c] += total
    mean = sums / count
    sums[:] = 0
    for n in range(x.shape[0]):
        for c in range(x.shape[1]):
            row = x[n, c]
            total = 0.0
            for i in range(row.size):
                apart = np.float64(row[i]) - mean[c]
                total += apart * apart
            sums[c] += total
    middle, factor = np.empty(mean.size, x.dtype), np.empty(mean.size, x.dtype)
    for c in range(mean.size):
        variance = sums[c] / count
        apart = mean[c] - others_mean[c]
        joint = own * variance + (1 - own) * others_variance[c] + own * (1 - own) * apart * apart
        joint = max(joint, (variance + eps) / AMPLIFICATION**2 - eps)
        reach = SHIFT * math.sqrt(joint + eps)
        joint_mean = min(max(mean[c] - (1 - own) * apart, mean[c] - reach), mean[c] + reach)
        found[MEAN, c], found[VARIANCE, c] = mean[c], variance
        found[JOINT_MEAN, c], found[JOINT_VARIANCE, c] = joint_mean, joint
        middle[c] = joint_mean
        factor[c] = weight[c] / math.sqrt(joint + eps)
    for n in range(x.shape[0]):
        for c in range(x.shape[1]):
            row, out, m, f, b = x[n, c], y[n, c], middle[c], factor[c], bias[c]
            for i in range(row.size):
                out[i] = (row[i] - m) * f + b


@making_sum_jit
def _by_own(shift, scale, mean, variance, joint_mean, inverse, count, others, is_local, eps):
    """The loss's derivatives by the batch's own mean and variance, through the joint ones."""
    others_count, others_mean, others_variance, others_shift, others_scale = others
    if is_local and count > 1:
        scale -= (mean - joint_mean) * inverse * shift
        return -shift * inverse, -0.5 * scale / (variance + eps)
    by_mean = -(shift + others_count * others_shift) * inverse
    by_variance = -0.5 * (scale + others_count * others_scale) * inverse * inverse
    own = count / (count + others_count)
    apart = mean - others_mean
    free = own * variance + (1 - own) * others_variance + own * (1 - own) * apart * apart
    least = (variance + eps) / AMPLIFICATION**2 - eps
    deviation = math.sqrt(max(free, least) + eps)
    beyond = (1 - own) * apart / (SHIFT * deviation)
    if beyond > 1:
        by_variance -= by_mean * (0.5 * SHIFT) / deviation
    elif beyond < -1:
        by_variance += by_mean * (0.5 * SHIFT) / deviation
    by_free = by_variance if free >= least else 0.0
    by_own = by_mean if abs(beyond) > 1 else own * by_mean
    by_own += by_free * (2 * own * (1 - own)) * apart
    return by_own, own * by_free + (by_variance - by_free) / AMPLIFICATION**2


@making_sum_jit
def backward(
    x, dy, weight, found, others_count, others_mean, others_variance, others_shift, others_scale,
    is_local, eps, wants_dx, dx, by_affine, seen,
):  # fmt: skip
    """Write the gradients by weight and bias, [2, C], and, where wanted, by x; and what was `Seen`."""
    count = x.shape[0] * x.shape[2]
    sums = np.zeros((2, x.shape[1]))
    for n in range(x.shape[0]):
        for c in range(x.shape[1]):
            row, upstream, mean = x[n, c], dy[n, c], found[JOINT_MEAN, c]
            by_bias = by_weight = 0.0
            for i in range(row.size):
                slope = np.float64(upstream[i])
                by_bias += slope
                by_weight += slope * (np.float64(row[i]) - mean)
            sums[0, c] += by_weight
            sums[1, c] += by_bias
    channels = x.shape[1]
    middle, factor = np.empty(channels, x.dtype), np.empty(channels, x.dtype)
    slopes, offset = np.empty(channels, x.dtype), np.empty(channels, x.dtype)
    for c in range(channels):
        inverse = 1 / math.sqrt(found[JOINT_VARIANCE, c] + eps)
        by_weight, by_bias = sums[0, c] * inverse, sums[1, c]
        by_affine[0, c], by_affine[1, c] = by_weight, by_bias
        shift, scale = weight[c] * by_bias, weight[c] * by_weight
        mean, variance = found[MEAN, c], found[VARIANCE, c]
        seen[0, c], seen[1, c] = count * mean, count * (variance + mean * mean)
        seen[2, c], seen[3, c] = shift, scale
        others = (others_count, others_mean[c], others_variance[c], others_shift[c], others_scale[c])
        by_mean, by_variance = _by_own(
            shift, scale, mean, variance, found[JOINT_MEAN, c], inverse, count, others, is_local, eps
        )  # fmt: skip
        # The mean's derivative by a value is 1 / count, the variance's 2 (x - mean) / count.
        middle[c], factor[c] = mean, weight[c] * inverse
        slopes[c], offset[c] = by_variance * (2 / count), by_mean / count
    if wants_dx:
        for n in range(x.shape[0]):
            for c in range(channels):
                row, upstream, out = x[n, c], dy[n, c], dx[n, c]
                m, f, s, o = middle[c], factor[c], slopes[c], offset[c]
                for i in range(row.size):
                    out[i] = upstream[i] * f + (row[i] - m) * s + o
