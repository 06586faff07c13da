// What the kernels of windowed attention share: the call, which keys a query sees, softmax, and heads over threads.
#pragma once
#include "simd.h"

constexpr float HIDDEN = -1e30f;

struct View {  // (B, heads, T, D), the last dimension dense
  void* at;
  int64_t batch, head, token;
};

struct Call {
  int64_t B, H, Hkv, Tq, Tk, D, window, threads;
  float scale;
  View q, k, v, out, dout, dq, dk, dv;
  const int32_t* segments;   // (B, Tk), may be null
  const float* sink_logits;  // (H,), may be null
  float *lse, *dsinks;       // (B, H, Tq), (B, H); dsinks may be null
};

template <class T>
static T* row(const View& x, int64_t b, int64_t h, int64_t t) {
  return (T*)x.at + b * x.batch + h * x.head + t * x.token;
}

// The oldest key that is seen at all.
INLINE int oldest(const Call& c) { return c.Tk - c.Tq + 1 > c.window ? c.Tk - c.Tq + 1 - c.window : 0; }

// Hides those of N keys that some of R queries do not see. `at` and `keys` count from the oldest key that is seen,
// `place` is query 0's position there; ids: segments of the keys; scores (R, N), `stride` apart.
template <int R, int N>
static void hide(const Call& c, const int32_t* ids, int keys, int at, int place, float* scores, int stride) {
  if (at + N - 1 <= place && at > place + R - 1 - c.window && !c.segments) return;
  vi step;
  for (int i = 0; i < W; i++) step[i] = i;
  for (int r = 0; r < R; r++) {
    int query = place + r, oldest = query - (int)c.window, own = c.segments && query < keys ? ids[query] : 0;
    for (int i = 0; i < N; i += W) {
      vi key = step + (at + i);
      vi seen = (key <= query) & (key > oldest);
      if (c.segments) {
        vi id;
        memcpy(&id, ids + at + i, sizeof id);
        seen = own < 0 ? vi{} : seen & (id == own);
      }
      float* s = scores + r * stride + i;
      store(s, seen ? load(s) : all(HIDDEN));
    }
  }
}

// p = e^(s - top) of n more scores of a row, whose largest score and sum so far are given; what was summed before
// is to be multiplied by *shrink.
template <class P>
static void softmax(const float* s, int n, P* p, float* top, float* total, float* shrink) {
  vf most = all(*top), sums{};
  for (int i = 0; i < n; i += W) most = larger(most, load(s + i));
  float now = largest(most), base = now > HIDDEN ? now : 0;  // a row that saw nothing yet has no maximum
  for (int i = 0; i < n; i += W) {
    vf e = exponential(load(s + i) - base);
    store(p + i, e), sums += e;
  }
  *shrink = *top > HIDDEN ? std::exp(*top - base) : 0;
  *total = *total * *shrink + sum(sums), *top = now;
}

// All key heads, each by one thread's `Head`. 0: done; 1: no memory.
template <class Head>
static int run(const Call& c, bool backward) {
  int failed = 0;
  int64_t next = 0;
  parallel(c.threads, [&](int, int) {
    Head head(c, backward);
    if (!head.memory.at) return (void)(failed = 1);
    for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < c.B * c.Hkv;)
      head.run(i / c.Hkv, i % c.Hkv, backward);
  });
  return failed;
}
