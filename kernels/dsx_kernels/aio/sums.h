// Checksums of blocks of 4,096 bytes, in memory.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace dsx {

constexpr int64_t BLOCK = 4096;

inline int64_t rounded(int64_t bytes) { return (bytes + BLOCK - 1) / BLOCK * BLOCK; }

// Sums of blocks, 0 where nothing was written. Each step is a bijection of the sum so far and of the word that is
// added, so that one word that changed is always seen; that the number of the block goes in shows a block that has come
// to lie in another's place.
class Sums {
  public:
    bool start(int64_t size) {
        known.reset(static_cast<uint64_t*>(std::calloc(size_t(rounded(size) / BLOCK), sizeof(uint64_t))));
        return bool(known);
    }
    explicit operator bool() const { return bool(known); }

    void keep(const char* data, int64_t bytes, int64_t offset) {
        for (int64_t at = 0; at < bytes; at += BLOCK) known[(offset + at) / BLOCK] = of(data + at, offset + at);
    }

    // How many bytes are as they were written.
    int64_t same(const char* data, int64_t bytes, int64_t offset) const {
        for (int64_t at = 0; at < bytes; at += BLOCK) {
            const uint64_t wanted = known[(offset + at) / BLOCK];
            if (wanted && of(data + at, offset + at) != wanted) return at;
        }
        return bytes;
    }

  private:
    static constexpr int WORDS = 8;
    static uint64_t mixed(uint64_t sum, uint64_t word) {
        const uint64_t product = (sum ^ word) * 0x9e3779b97f4a7c15u;
        return product << 29 | product >> 35;
    }
    static uint64_t of(const char* data, int64_t offset) {
        uint64_t sums[WORDS], words[WORDS], sum = 0;
        for (int i = 0; i < WORDS; i++) sums[i] = mixed(uint64_t(offset), uint64_t(i));
        for (int64_t at = 0; at < BLOCK; at += sizeof words) {
            std::memcpy(words, data + at, sizeof words);
            for (int i = 0; i < WORDS; i++) sums[i] = mixed(sums[i], words[i]);
        }
        for (int i = 0; i < WORDS; i++) sum = mixed(sum, sums[i]);
        return sum ? sum : 1;
    }

    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    std::unique_ptr<uint64_t[], Free> known;
};

}  // namespace dsx
