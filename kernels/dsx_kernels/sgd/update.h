// The update of one element by stochastic gradient descent.
#pragma once
#include "../numbers.h"

namespace dsx {

// What is the same for all elements: multiplier (negative to maximize), limit, weight decay, what the buffer and the
// gradient are multiplied by in their sum, momentum, lr.
template <class W> struct SGDNumbers {
    W multiplier, limit, decay, keep, share, momentum, rate;
};

template <class W> struct SGDState {
    W weight, buffer;
};

template <bool MOMENTUM, bool NESTEROV, class W>
DSX_INLINE SGDState<W> sgd_update(const SGDNumbers<W>& k, W gradient, SGDState<W> old) {
    const W grad = clamped(gradient, k.multiplier, k.limit) + k.decay * old.weight;
    if (!MOMENTUM) return {old.weight - k.rate * grad, W(0)};
    const W buffer = k.keep * old.buffer + k.share * grad;
    const W direction = NESTEROV ? grad + k.momentum * buffer : buffer;
    return {old.weight - k.rate * direction, buffer};
}

}  // namespace dsx
