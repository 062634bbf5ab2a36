"""The loops of `statistics.py`, compiled, as those of the shards are (`model/statkernels.py`).

`widths` are the channels of each layer.
"""

import math

from shoestring.compiled.jit import making_jit


@making_jit
def gather(sums, counts, widths, factor, count, mean, variance, shift, scale):
    """What this worker's layers have seen, from their sums, [4, C]; its slopes count by `factor`."""
    c = 0
    for k in range(widths.size):
        end = c + widths[k]
        is_told = counts[k] > 0
        for row in range(4):
            for i in range(c, end):
                is_told = is_told and math.isfinite(sums[row, i])  # else the batch tells nothing
        n = counts[k] if is_told else 1.0
        count[k] = counts[k] if is_told else 0.0
        for i in range(c, end):
            mean[i] = sums[0, i] / n if is_told else 0.0
            variance[i] = max(sums[1, i] / n - mean[i] * mean[i], 0.0) if is_told else 0.0
            shift[i] = factor * (sums[2, i] / n) if is_told else 0.0
            scale[i] = factor * (sums[3, i] / n) if is_told else 0.0
        c = end


@making_jit
def subtract(every, own, widths, least, reach, trust, factor, counts, rows, running):
    """What others have seen: the history of all, less this worker's share.

    It is the whole, and that by which the whole differs from the share: no large numbers cancel.
    `counts` are the values to count them as, -1 where there is nothing but rounding; `rows` [4, C]
    mean, variance and slopes, in units of this worker's; `running` [2, C] what evaluation uses.
    """
    weight, all_count, mean, variance, shift, scale = every
    _, own_count, own_mean, own_variance, own_shift, own_scale = own
    c = 0
    for k in range(widths.size):
        count = all_count[k] - own_count[k]
        is_known = count > least * all_count[k]
        ratio, counts[k] = 0.0, -1.0
        if is_known:
            ratio = own_count[k] / count
            counts[k] = count / weight[k] * (min(weight[k], reach) * trust)
        unbiased = all_count[k] / max(all_count[k] - 1, 1.0)
        for _ in range(widths[k]):
            apart = mean[c] - own_mean[c]
            within = variance[c] + ratio * (variance[c] - own_variance[c])
            rows[0, c] = mean[c] + ratio * apart
            rows[1, c] = max(within - (ratio + ratio * ratio) * apart * apart, 0.0)
            rows[2, c] = (shift[c] + ratio * (shift[c] - own_shift[c])) / factor
            rows[3, c] = (scale[c] + ratio * (scale[c] - own_scale[c])) / factor
            running[0, c], running[1, c] = mean[c], variance[c] * unbiased
            c += 1
