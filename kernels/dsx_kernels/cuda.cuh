// What every cuda.cu shares: how the threads of a grid share out the elements of slices, and read and write them.
//
// Compiled by NVRTC for the dtypes of a call, by nvcc and for the CPU in the tests; no header but our own.
#pragma once

#include "numbers.h"

namespace dsx {

constexpr int THREADS = 256;  // of a block
constexpr int ACCESS = 16;    // bytes of the widest access to memory

// In place of a slice that is not given.
struct none {};

template <class T> constexpr bool is_given = true;
template <> constexpr bool is_given<none> = false;

// Elements that a thread works on at a time: of the narrowest slice, what one access holds.
template <class... T> constexpr int each = 1;
template <class First, class... Rest>
constexpr int each<First, Rest...> = !is_given<First> || each<Rest...> > ACCESS / int(sizeof(First))
    ? each<Rest...>
    : ACCESS / int(sizeof(First));

template <int VALUE> struct constant {
    static constexpr int value = VALUE;
};

// A thread of the whole grid; no block has its own index of more than 31 bits.
__device__ inline int64_t this_thread() { return int64_t(blockIdx.x) * THREADS + threadIdx.x; }

// Calls `body(constant<N>, at)` so that the elements [at, at + N) of all calls are [0, count), each once.
//
// N is EACH from `head` on, where a thread finds what it reads at a multiple of ACCESS bytes; it is 1 before, and for
// what is left at the end. The grid has a thread for each vector, and for each other element.
template <int EACH, class Body> __device__ inline void for_each(int64_t count, int64_t head, const Body& body) {
    const int64_t vectors = (count - head) / EACH, thread = this_thread();
    if (thread < vectors) body(constant<EACH>{}, head + thread * EACH);
    if (thread < count - vectors * EACH) body(constant<1>{}, thread < head ? thread : thread + vectors * EACH);
}

template <class T> struct alignas(ACCESS) Vector {
    static constexpr int WIDTH = ACCESS / sizeof(T);
    T elements[WIDTH];
};

// N elements from `at` on, widened as they are read; of what is not given, nothing.
template <class T, class W, int N> __device__ inline void read(const T* data, int64_t at, W (&values)[N]) {
    if constexpr (!is_given<T>) {
        return;
    } else if constexpr (N == 1) {
        values[0] = W(widen(data[at]));
    } else {
        constexpr int WIDTH = Vector<T>::WIDTH;
        const uint4* vectors = reinterpret_cast<const uint4*>(data + at);
#pragma unroll
        for (int number = 0; number < N / WIDTH; number++) {
            const Vector<T> vector = bit_cast<Vector<T>>(__ldca(vectors + number));
#pragma unroll
            for (int i = 0; i < WIDTH; i++) values[number * WIDTH + i] = W(widen(vector.elements[i]));
        }
    }
}

// Puts values, rounded to nearest, into N elements from `at` on; where none are given, nothing.
template <class T, class W, int N> __device__ inline void write(T* data, int64_t at, const W (&values)[N]) {
    if constexpr (!is_given<T>) {
        return;
    } else if constexpr (N == 1) {
        data[at] = narrow<T>(values[0]);
    } else {
        constexpr int WIDTH = Vector<T>::WIDTH;
        uint4* vectors = reinterpret_cast<uint4*>(data + at);
#pragma unroll
        for (int number = 0; number < N / WIDTH; number++) {
            Vector<T> vector;
#pragma unroll
            for (int i = 0; i < WIDTH; i++) vector.elements[i] = narrow<T>(values[number * WIDTH + i]);
            __stwb(vectors + number, bit_cast<uint4>(vector));
        }
    }
}

}  // namespace dsx
