// Rotary position embedding, half-split pairs, forward and backward (the turn by minus the angle): see ops/rotate.py.
//
//   y_i = x_i cos - x_{i+R} sin,  y_{i+R} = x_{i+R} cos + x_i sin  for i < R;  features from 2 R on are copied
//
// Each number is read and written once, where it lies: heads of a product of queries, keys and values need no copy.
#include "simd.h"

struct Call {
  int64_t B, T, H, D, R, threads;
  int64_t at[3];           // between rows, tokens, heads of x, whose features lie side by side
  int64_t per_row;         // between the angles of one row of tokens and the next, 0 where all have the same
  const float *cos, *sin;  // (T, R) or (B, T, R)
  const void* x;
  void* out;  // (B, T, H, D)
};

template <class T>
static void token(const Call& c, int64_t i, float sign) {
  const int R = c.R;
  int64_t b = i / c.T, t = i % c.T;
  const float *cos = c.cos + b * c.per_row + t * R, *sin = c.sin + b * c.per_row + t * R;
  auto turn = [&](const T* x, T* y, int j, int rest) __attribute__((always_inline)) {
    vf a = load(x + j, rest), b = load(x + R + j, rest), u = load(cos + j, rest), v = sign * load(sin + j, rest);
    store(y + j, a * u - b * v, rest);
    store(y + R + j, b * u + a * v, rest);
  };
  for (int64_t h = 0; h < c.H; h++) {
    const T* x = (const T*)c.x + b * c.at[0] + t * c.at[1] + h * c.at[2];
    T* y = (T*)c.out + (i * c.H + h) * c.D;
    int j = 0;
    for (; j + W <= R; j += W) turn(x, y, j, W);
    if (j < R) turn(x, y, j, R - j);
    memcpy(y + 2 * R, x + 2 * R, (c.D - 2 * R) * sizeof(T));
  }
}

// `half`: what is void here is bfloat16, else float32.
extern "C" void rotate(const Call* c, int half, int back) {
  parallel(c->threads, [&](int n, int threads) {
    int64_t N = c->B * c->T;
    for (int64_t i = N * n / threads; i < N * (n + 1) / threads; i++)
      half ? token<bf16>(*c, i, back ? -1 : 1) : token<float>(*c, i, back ? -1 : 1);
  });
}
