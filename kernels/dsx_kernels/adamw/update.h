// AdamW's update of one element.
#pragma once
#include "../numbers.h"

namespace dsx {

// What is the same for all elements: multiplier (negative to maximize), limit, 1 - beta1, beta2, 1 - beta2,
// 1 - lr * weight_decay, lr / (1 - beta1^step), 1 / sqrt(1 - beta2^step), eps.
template <class W> struct AdamWNumbers {
    W multiplier, limit, take1, keep2, take2, decay, rate, scale, eps;
};

template <class W> struct AdamWState {
    W weight, mean, square, most;
};

template <bool AMSGRAD, class W>
DSX_INLINE AdamWState<W> adamw_update(const AdamWNumbers<W>& k, W gradient, AdamWState<W> old) {
    const W grad = clamped(gradient, k.multiplier, k.limit);
    const W mean = old.mean + k.take1 * (grad - old.mean);
    const W square = k.keep2 * old.square + k.take2 * grad * grad;
    const bool kept = AMSGRAD && (old.most >= square || old.most != old.most);
    const W most = kept ? old.most : square;
    const W weight = old.weight * k.decay - k.rate * (mean / (root(most) * k.scale + k.eps));
    return {weight, mean, square, most};
}

}  // namespace dsx
