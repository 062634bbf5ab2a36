"""The loops of `statistics.py`, compiled: there are few numbers, and NumPy would take longer to be asked.

What they compute is defined to the bit: float64 at every step, in the order written here, no
multiply fused with an add. `widths` are the channels of each layer.
"""

import math

import numpy as np

from shoestring.compiled.jit import making_jit

COUNT_LIMIT = 2.0**40
MEAN_LIMIT = 2.0**60  # beyond it the sums that normalise would leave float32
VARIANCE_LIMIT = MEAN_LIMIT**2
LOWEST, HIGHEST = -120, 100  # exponents of slopes

# What `read` may say.
FINE, BAD_MOMENT, BAD_WEIGHT, BAD_COUNT, BAD_SLOPE = range(5)


@making_jit
def read(floats, small, widths, longest, weight, count, mean, variance, shift, scale):
    """Take statistics as they travel; say what is wrong with them. Comparisons are false for NaN."""
    layers, channels = widths.size, mean.size
    for c in range(channels):
        mean[c], variance[c] = floats[2 * layers + c], floats[2 * layers + channels + c]
        if not (abs(mean[c]) <= MEAN_LIMIT and 0 <= variance[c] <= VARIANCE_LIMIT):
            return BAD_MOMENT
    c = 0
    for k in range(layers):
        weight[k], count[k] = floats[k], floats[layers + k]
        if not 0 <= weight[k] <= longest[k]:
            return BAD_WEIGHT
        if not 0 <= count[k] <= COUNT_LIMIT or (weight[k] == 0 and count[k] != 0):
            return BAD_COUNT
        by_shift, by_scale = np.int64(small[k]), np.int64(small[layers + k])
        if min(by_shift, by_scale) < LOWEST or max(by_shift, by_scale) > HIGHEST:
            return BAD_SLOPE
        shift_step, scale_step = math.ldexp(1.0, by_shift), math.ldexp(1.0, by_scale)
        for _ in range(widths[k]):
            shift[c] = np.float64(small[2 * layers + c]) * shift_step
            scale[c] = np.float64(small[2 * layers + channels + c]) * scale_step
            c += 1
    return FINE


@making_jit
def _quantise(slopes, codes):
    """Write slopes as bytes times a power of two, whose exponent is returned: the largest is below 128."""
    largest = 0.0
    for slope in slopes:
        largest = max(largest, abs(slope))
    exponent = min(max(math.frexp(largest)[1] - 7, LOWEST), HIGHEST)
    step = math.ldexp(1.0, exponent)
    for c in range(slopes.size):
        codes[c] = np.int8(min(max(np.rint(slopes[c] / step), -127.0), 127.0))
    return exponent


@making_jit
def write(weight, count, mean, variance, shift, scale, widths, floats, small):
    """Give statistics the form in which they travel."""
    layers, channels = widths.size, mean.size
    for c in range(channels):
        floats[2 * layers + c] = min(max(mean[c], -MEAN_LIMIT), MEAN_LIMIT)
        floats[2 * layers + channels + c] = min(variance[c], VARIANCE_LIMIT)
    c = 0
    for k in range(layers):
        floats[k], floats[layers + k] = weight[k], min(count[k], COUNT_LIMIT)
        end = c + widths[k]
        codes = small[2 * layers :]
        small[k] = _quantise(shift[c:end], codes[c:end])
        small[layers + k] = _quantise(scale[c:end], codes[channels + c : channels + end])
        c = end


@making_jit
def fade(weight, count, totals, widths, keep, steps):
    """Let so many steps go by; `totals` are [4, C]."""
    c = 0
    for k in range(widths.size):
        gone = min(steps[k], 1 / (1 - keep[k]))
        left = 1 - (1 - keep[k]) * gone
        weight[k] = left * weight[k] + gone
        count[k] *= left
        for _ in range(widths[k]):
            for row in range(4):
                totals[row, c] *= left
            c += 1


@making_jit
def add(count, totals, widths, seen_count, mean, variance, shift, scale):
    """Add a worker's batches to the sums."""
    c = 0
    for k in range(widths.size):
        n = seen_count[k]
        count[k] += n
        for _ in range(widths[k]):
            totals[0, c] += n * mean[c]
            totals[1, c] += n * (variance[c] + mean[c] * mean[c])
            totals[2, c] += n * shift[c]
            totals[3, c] += n * scale[c]
            c += 1


@making_jit
def divide(count, totals, widths, mean, variance, shift, scale):
    """What the sums come to; zeros for a layer that has seen nothing."""
    c = 0
    for k in range(widths.size):
        n = max(count[k], 2.0**-1022)
        for _ in range(widths[k]):
            mean[c] = totals[0, c] / n
            variance[c] = max(totals[1, c] / n - mean[c] * mean[c], 0.0)
            shift[c], scale[c] = totals[2, c] / n, totals[3, c] / n
            c += 1
