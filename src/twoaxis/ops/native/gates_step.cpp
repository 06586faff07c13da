// Gates of a read over depth, for the few tokens of a decoding step: float32, one thread, no gradients.
#include <cmath>

#include "simd.h"

static float dot(const float* a, const float* b, int n) {
  vf p[2] = {};
  int j = 0;
  for (; j + W2 <= n; j += W2) p[0] += load(a + j) * load(b + j), p[1] += load(a + j + W) * load(b + j + W);
  for (; j < n; j += W) p[0] += load(a + j, n - j) * load(b + j, n - j);
  return sum(p[0] + p[1]);
}

static float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }
static float inverse_rms(const float* x, int d, double eps) { return 1 / std::sqrt(dot(x, x, d) / d + eps); }

struct Window {
  int64_t N, d, n, most;       // tokens, width, states in sight, the widest window
  const float *h, *u, *c;      // (N, d), (d,), (1,)
  double eps, ramp;
  float *K, *logs;             // (N,), (n, N) oldest first
};

// K_t = 1 + (most - 1) sigmoid(<u, rms(h)> + c) and log clip((ramp + K_t - 1 - z) / ramp, 0, 1) at age z.
extern "C" int soft_window(const Window* w) {
  const int d = w->d, n = w->n;
  for (int64_t t = 0; t < w->N; t++) {
    const float* h = w->h + t * d;
    float K = w->K[t] = 1 + (w->most - 1) * sigmoid(dot(w->u, h, d) * inverse_rms(h, d, w->eps) + *w->c);
    for (int z = 0; z < n; z++) {
      float m = z ? (float(w->ramp) + K - 1 - z) / float(w->ramp) : 1;
      w->logs[(n - 1 - z) * w->N + t] = m <= 0 ? -INFINITY : m < 1 ? std::log(m) : m != m ? m : 0;
    }
  }
  return 0;
}

struct Axes {
  int64_t N, d, gates;         // gates divide d, each for its share of the features
  const float *s, *z, *w, *b;  // (N, d), (N, d), (gates, 2 d), (gates,)
  double eps;
  float* out;                  // (N, d)
};

// G s' + (1 - G) z' with s' = rms(s), z' = rms(z), G = sigmoid(w [s'; z'] + b); exact at G = 0 and G = 1.
extern "C" int axis_gate(const Axes* c) {
  const int d = c->d, each = d / c->gates;
  for (int64_t t = 0; t < c->N; t++) {
    const float *s = c->s + t * d, *z = c->z + t * d;
    float rs = inverse_rms(s, d, c->eps), rz = inverse_rms(z, d, c->eps), *out = c->out + t * d;
    for (int64_t g = 0; g < c->gates; g++) {
      const float* w = c->w + g * 2 * d;
      float G = sigmoid(rs * dot(w, s, d) + rz * dot(w + d, z, d) + c->b[g]);
      for (int j = g * each; j < (g + 1) * each; j++) {
        float a = rs * s[j], b = rz * z[j];
        out[j] = G < 0.5f ? b + G * (a - b) : a - (1 - G) * (a - b);
      }
    }
  }
  return 0;
}
