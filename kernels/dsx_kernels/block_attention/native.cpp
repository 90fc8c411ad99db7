// block_attention: softmax attention over lists of blocks, forward and backward.
//
// The passes are written once (products.h, engine.h) over a few vector operations (vectors_*.h), and compiled for each
// instruction set. Unlike elementwise kernels they use fused multiply-add and the processor's products of bfloat16.
#include "problem.h"

#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

#ifdef DSX_X86
#include <immintrin.h>
#endif

// Everything between is compiled for an instruction set, templates too.
#define DSX_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define DSX_TARGET(set) DSX_PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define DSX_TARGET_END _Pragma("clang attribute pop")
#else
#define DSX_TARGET(set) _Pragma("GCC push_options") DSX_PRAGMA(GCC target(set))
#define DSX_TARGET_END _Pragma("GCC pop_options")
#endif

#if defined(__clang__)
#define DSX_SHUFFLE(type, one, other, ...) __builtin_shufflevector(one, other, __VA_ARGS__)
#else
#define DSX_SHUFFLE(type, one, other, ...) __builtin_shuffle(one, other, type{__VA_ARGS__})
#endif

namespace dsx {

namespace generic {
#include "vectors_generic.h"
#include "products.h"
#include "engine.h"
}  // namespace generic

#ifdef DSX_X86
DSX_TARGET("avx2,fma,f16c")
namespace avx2 {
#include "vectors_avx2.h"
#include "products.h"
#include "engine.h"
}  // namespace avx2
DSX_TARGET_END

DSX_TARGET("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,prefer-vector-width=512")
namespace avx512 {
#include "vectors_avx512.h"
#include "products.h"
#include "engine.h"
}  // namespace avx512
DSX_TARGET_END

DSX_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c,prefer-vector-width=512")
#define DSX_PAIRS
namespace avx512_bf16 {
#include "vectors_avx512.h"
#include "products.h"
#include "engine.h"
}  // namespace avx512_bf16
#undef DSX_PAIRS
DSX_TARGET_END
#endif

namespace {

Passes passes_for(const Problem& p) {
#ifdef DSX_X86
    const bool products = p.q.type == BFLOAT16 && p.dim % 2 == 0 && __builtin_cpu_supports("avx512bf16");
    if (instructions == AVX512 && products) return avx512_bf16::Engine<avx512_bf16::Pairs>::passes();
    if (instructions == AVX512) return avx512::Engine<avx512::Wide>::passes();
    if (instructions == AVX2) return avx2::Engine<avx2::Wide>::passes();
#endif
    return generic::Engine<generic::Wide>::passes();
}

// Memory of one call: a workspace for each thread, packed keys and values of `slots` key heads.
class Memory {
  public:
    Memory(const Problem& p, const Passes& passes, int32_t threads, int64_t slots, bool backward) {
        const int64_t width = (p.dim + passes.lanes - 1) / passes.lanes * passes.lanes;
        packed_.sums = p.key_blocks * p.block * width;
        packed_.units = packed_.sums / passes.pair;
        each_ = passes.workspace(p);
        const int64_t operands = slots * packed_.units, sums = slots * packed_.sums;
        const int64_t words = (backward ? 3 : 2) * operands + (backward ? 2 : 0) * sums;
        const size_t bytes = size_t(threads * each_ + words * 4);
        align_ = std::align_val_t(bytes < 2 * HUGE ? 64 : HUGE);
        memory_ = static_cast<char*>(::operator new(bytes, align_));
#ifdef MADV_HUGEPAGE
        // A row of blocks reads all of it: more small pages than a core remembers the places of.
        if (bytes >= 2 * HUGE) madvise(memory_, bytes, MADV_HUGEPAGE);
#endif
        Unit* at = reinterpret_cast<Unit*>(memory_ + threads * each_);
        packed_.k_across = at;
        packed_.v_along = packed_.k_along = at + operands;
        packed_.v_across = at + 2 * operands;
        packed_.grad_k = reinterpret_cast<float*>(at + 3 * operands);
        packed_.grad_v = packed_.grad_k + sums;
    }
    ~Memory() { ::operator delete(memory_, align_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    Packed& packed() { return packed_; }
    char* workspace() { return memory_ + omp_get_thread_num() * each_; }

  private:
    static constexpr size_t HUGE = size_t(2) << 20;  // bytes of a huge page
    Packed packed_ = {};
    char* memory_;
    std::align_val_t align_;
    int64_t each_;
};

void pack(const Problem& p, const Passes& passes, Memory& memory, int64_t slots, bool backward, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
    for (int64_t slot = 0; slot < slots; slot++)
        for (int64_t block = 0; block < p.key_blocks; block++)
            passes.pack(p, memory.packed(), memory.packed().first + slot, block, backward, memory.workspace());
}

// Rows of blocks of all query heads of the packed key heads. The last rows have the longest lists, if any differ.
template <class Pass>
void for_each_row(const Problem& p, Pass pass, Memory& memory, int64_t slots, int32_t threads) {
    const int64_t members = p.group_size(), items = slots * members * p.query_blocks;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t item = 0; item < items; item++) {
        const int64_t row = p.query_blocks - 1 - item / (slots * members), index = item % (slots * members);
        const int64_t slot = memory.packed().first + index / members;
        const int64_t key_head = slot % p.key_heads;
        const Head head = {slot / p.key_heads, key_head * members + index % members, key_head};
        pass(p, memory.packed(), head, row, memory.workspace());
    }
}

// Key heads that are packed together: enough rows for all threads, and little memory.
int64_t slots_together(const Problem& p, int32_t threads) {
    const int64_t rows = std::max<int64_t>(1, p.group_size() * p.query_blocks);
    return std::min(p.slots(), std::max<int64_t>(1, (8 * threads + rows - 1) / rows));
}

void forward(const Problem& p, int32_t threads) {
    const Passes passes = passes_for(p);
    const int64_t together = slots_together(p, threads);
    Memory memory(p, passes, threads, together, false);
    for (int64_t slot = 0; slot < p.slots(); slot += together) {
        const int64_t slots = std::min(together, p.slots() - slot);
        memory.packed().first = slot;
        pack(p, passes, memory, slots, false, threads);
        for_each_row(p, passes.forward, memory, slots, threads);
    }
}

// Key heads are the items of work: each block is recomputed once, for five products.
void backward_by_heads(const Problem& p, const Passes& passes, int32_t threads) {
    const int64_t together = std::min<int64_t>(threads, p.slots());
    Memory memory(p, passes, threads, together, true);
    for (int64_t slot = 0; slot < p.slots(); slot += together) {
        const int64_t slots = std::min(together, p.slots() - slot);
        memory.packed().first = slot;
        pack(p, passes, memory, slots, true, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
        for (int64_t item = 0; item < slots; item++)
            passes.backward_slot(p, memory.packed(), slot + item, memory.workspace());
    }
}

// Rows of blocks, then columns, are the items: each block is recomputed twice, for seven products.
void backward_by_blocks(const Problem& p, const Passes& passes, int32_t threads) {
    const int64_t together = slots_together(p, threads);
    Memory memory(p, passes, threads, together, true);
    for (int64_t slot = 0; slot < p.slots(); slot += together) {
        const int64_t slots = std::min(together, p.slots() - slot), items = slots * p.key_blocks;
        memory.packed().first = slot;
        pack(p, passes, memory, slots, true, threads);
        for_each_row(p, passes.backward_row, memory, slots, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
        for (int64_t item = 0; item < items; item++)
            passes.backward_column(p, memory.packed(), slot + item % slots, item / slots, memory.workspace());
    }
}

}  // namespace
}  // namespace dsx

DSX_API void dsx_block_attention_forward(const dsx::Problem* problem, int32_t threads) {
    dsx::forward(*problem, threads);
}

DSX_API void dsx_block_attention_backward(const dsx::Problem* problem, int32_t threads) {
    using namespace dsx;
    const Passes passes = passes_for(*problem);
    const int64_t slots = problem->slots(), longest = (slots + threads - 1) / threads;
    if (5 * longest * threads <= 7 * slots) backward_by_heads(*problem, passes, threads);
    else backward_by_blocks(*problem, passes, threads);
}
