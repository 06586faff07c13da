// Gates of a read over depth, for the few tokens of a decoding step: float32, one thread, no gradients.
#include "steps.h"

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
      w->logs[(n - 1 - z) * w->N + t] = z ? log_sight(K, float(w->ramp), z) : 0;
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

extern "C" int axis_gate(const Axes* c) {
  const int d = c->d;
  for (int64_t t = 0; t < c->N; t++)
    axis_mix(c->s + t * d, c->z + t * d, c->w, c->b, d, c->gates, c->eps, c->out + t * d);
  return 0;
}
