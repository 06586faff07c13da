// What a sublayer of Deep Delta Learning reads, for the few tokens of a decoding step: float32, one thread, no gradients.
//
// Per token, X (d, m):  u_i = sum_v X_iv W_iv,  W_iv = sum_j p_j w_i,v-j+left  (or W = w, or u = X),  c = rms(u) * gain,
//   beta = 2 sigmoid(<g, c> + g_0),   v = act(W_v x + b_v),  x = u or c,  act(z) = scale sigmoid(z) or z.
#include "simd.h"

struct Call {
  int64_t N, d, m, taps;          // taps of w; 0: u = X, and m counts the targets alone
  const float *state, *w, *p;     // (N, d, m) or (N, d); (d, taps); (m,), may be null
  const float *gain, *gate, *gate_bias, *target, *target_bias;  // (d,), (d,), (1,), (m, d), (m,), the last may be null
  double eps, scale;              // scale 0: no sigmoid
  int64_t raw;                    // targets are made from u, not from c
  float *c, *v, *beta;            // (N, d), (N, m), (N,)
};

// u of one token; by[v * taps + a]: how much tap a counts for channel v.
template <int M>
static void compress(const Call& c, const float* X, const float* by, float* u) {
  const int m = M ? M : (int)c.m, taps = M ? M : (int)c.taps;
  for (int i = 0; i < c.d; i++) {
    float total = 0;
    for (int v = 0; v < m; v++) {
      float weight = 0;
      for (int a = 0; a < taps; a++) weight += by[v * taps + a] * c.w[i * taps + a];
      total += X[i * m + v] * weight;
    }
    u[i] = total;
  }
}

// 0: done; 1: no memory.
extern "C" int delta_step(const Call* call) {
  const Call& c = *call;
  const int d = c.d, m = c.m, taps = c.taps, left = (taps - 1) / 2;
  Buffer memory(d + m * taps + 1);
  float *room = memory.at, *by = room + d;
  if (!room) return 1;
  for (int v = 0; v < m; v++)
    for (int a = 0; a < taps; a++) {
      int j = v + left - a;
      by[v * taps + a] = c.p ? (j >= 0 && j < m ? c.p[j] : 0) : a == v;
    }
  for (int64_t t = 0; t < c.N; t++) {
    const float *u = c.state + t * d * (taps ? m : 1), *made = room;
    if (taps) {
      (m == 4 && taps == 4 ? compress<4> : compress<0>)(c, u, by, room);
      u = made;
    }
    float *y = c.c + t * d, r = inverse_rms(u, d, c.eps);
    for (int j = 0; j < d; j++) y[j] = r * u[j] * c.gain[j];
    c.beta[t] = 2 * sigmoid(dot(c.gate, y, d) + *c.gate_bias);
    for (int k = 0; k < m; k++) {
      float z = dot(c.target + (int64_t)k * d, c.raw ? u : y, d) + (c.target_bias ? c.target_bias[k] : 0);
      c.v[t * m + k] = c.scale == 0 ? z : float(c.scale) * sigmoid(z);
    }
  }
  return 0;
}
