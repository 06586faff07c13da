// The transpose of a matrix of 16-bit numbers: see ops/transpose.py.
//
// Tiles of 64 x 64 numbers (one side's rows of two cache lines each) are turned in blocks of 8 x 8 held in eight
// vectors, by three rounds of interleaving, so every line is read and written whole: 4 bytes a number.
#include "simd.h"

struct Call {
  int64_t rows, columns, threads;
  const uint16_t* x;  // (rows, columns)
  uint16_t* out;      // (columns, rows)
};

typedef uint16_t v8 __attribute__((vector_size(16)));

INLINE v8 low(v8 a, v8 b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
INLINE v8 high(v8 a, v8 b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }

static void block(const uint16_t* x, int64_t step, uint16_t* out, int64_t out_step) {
  v8 a[8], b[8];
  for (int i = 0; i < 8; i++) memcpy(&a[i], x + i * step, 16);
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < 4; i++) b[2 * i] = low(a[i], a[i + 4]), b[2 * i + 1] = high(a[i], a[i + 4]);
    memcpy(a, b, sizeof a);
  }
  for (int i = 0; i < 8; i++) memcpy(out + i * out_step, &a[i], 16);
}

constexpr int64_t TILE = 64;

static void tile(const Call& c, int64_t i, int64_t j) {
  int64_t last_i = i + TILE < c.rows ? i + TILE : c.rows, last_j = j + TILE < c.columns ? j + TILE : c.columns;
  int64_t whole_i = i + (last_i - i) / 8 * 8, whole_j = j + (last_j - j) / 8 * 8;
  for (int64_t q = j; q < whole_j; q += 8)
    for (int64_t p = i; p < whole_i; p += 8) block(c.x + p * c.columns + q, c.columns, c.out + q * c.rows + p, c.rows);
  for (int64_t q = j; q < last_j; q++)
    for (int64_t p = q < whole_j ? whole_i : i; p < last_i; p++) c.out[q * c.rows + p] = c.x[p * c.columns + q];
}

extern "C" void transpose(const Call* c) {
  int64_t down = (c->rows + TILE - 1) / TILE, across = (c->columns + TILE - 1) / TILE;
  parallel(c->threads, [&](int n, int threads) {
    for (int64_t k = down * across * n / threads; k < down * across * (n + 1) / threads; k++)
      tile(*c, k % down * TILE, k / down * TILE);
  });
}
