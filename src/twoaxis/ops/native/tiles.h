// Matrix tiles of bfloat16 (Intel's AMX): eight of 16 rows of 64 bytes, all of them used whole.
//
// tile_multiply(c, a, b): c (16, 16) floats += a (16, 32) b (32, 16), where b lies as 16 rows of 16 pairs, the pair j
// of row i being entries (2 i, j) and (2 i + 1, j). Tile numbers are literals. A thread holds a `Tiles` while it uses
// them. Without the processor's tiles the same is computed as Intel documents it, in plain C++: slow, for tests.
#pragma once
#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, rest[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static const TileShapes SHAPES;

// Some compilers do not say that loading a tile reads memory: what was written must be there before.
#define tile_load(t, at, stride)      \
  do {                                \
    asm volatile("" ::: "memory");    \
    _tile_loadd(t, at, (long)stride); \
  } while (0)
#define tile_store(t, at, stride) _tile_stored(t, at, (long)stride)
#define tile_zero(t) _tile_zero(t)
#define tile_multiply(c, a, b) _tile_dpbf16ps(c, a, b)

struct Tiles {
  Tiles() { _tile_loadconfig(&SHAPES); }
  ~Tiles() { _tile_release(); }
};

// Linux lets a process use tiles once it has asked, for all of its threads.
static inline bool tiles_permitted() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
#else
struct Tiles {
  Tiles() { held()++; }
  ~Tiles() { held()--; }
  static int& held() {
    static thread_local int count = 0;
    return count;
  }
  static char* rows(int t) {  // of tile t, 64 bytes each
    static thread_local char all[8][16 * 64];
    if (!held()) abort();  // as the processor would
    return all[t];
  }
};

static inline bool tiles_permitted() { return true; }

static inline void tile_load(int t, const void* at, int64_t stride) {
  for (int i = 0; i < 16; i++) memcpy(Tiles::rows(t) + 64 * i, (const char*)at + i * stride, 64);
}

static inline void tile_store(int t, void* at, int64_t stride) {
  for (int i = 0; i < 16; i++) memcpy((char*)at + i * stride, Tiles::rows(t) + 64 * i, 64);
}

static inline void tile_zero(int t) { memset(Tiles::rows(t), 0, 16 * 64); }

static inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }

static inline float widened(uint16_t bits) {
  uint32_t u = (uint32_t)bits << 16;
  float x;
  memcpy(&x, &u, 4);
  return flushed(x);
}

static inline void tile_multiply(int c, int a, int b) {  // even and odd entries have sums of their own
  float* C = (float*)Tiles::rows(c);
  const uint16_t *A = (const uint16_t*)Tiles::rows(a), *B = (const uint16_t*)Tiles::rows(b);
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      float even = 0, odd = 0;
      for (int k = 0; k < 16; k++) {
        even = flushed(std::fma(widened(A[m * 32 + 2 * k]), widened(B[k * 32 + 2 * n]), even));
        odd = flushed(std::fma(widened(A[m * 32 + 2 * k + 1]), widened(B[k * 32 + 2 * n + 1]), odd));
      }
      C[m * 16 + n] = flushed(flushed(C[m * 16 + n]) + flushed(even + odd));
    }
}
#endif
