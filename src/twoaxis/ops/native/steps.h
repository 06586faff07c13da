// What several kernels of a decoding step compute alike: float32, one token.
#pragma once
#include "simd.h"

// log clip((ramp + K - 1 - z) / ramp, 0, 1): how much a soft window of K states sees of age z.
INLINE float log_sight(float K, float ramp, int z) {
  float m = (ramp + K - 1 - z) / ramp;
  return m <= 0 ? -INFINITY : m < 1 ? std::log(m) : m != m ? m : 0;
}

// G s' + (1 - G) z' with s' = rms(s), z' = rms(z), G = sigmoid(w [s'; z'] + b); exact at G = 0 and G = 1.
// gates divide d, each for its share of the features; w (gates, 2 d), b (gates,).
static inline void axis_mix(
    const float* s, const float* z, const float* w, const float* b, int d, int gates, double eps, float* out) {
  float rs = inverse_rms(s, d, eps), rz = inverse_rms(z, d, eps);
  for (int k = 0, each = d / gates; k < gates; k++, w += 2 * d) {
    float G = sigmoid(rs * dot(w, s, d) + rz * dot(w + d, z, d) + b[k]);
    for (int j = k * each; j < (k + 1) * each; j++) {
      float x = rs * s[j], y = rz * z[j];
      out[j] = G < 0.5f ? y + G * (x - y) : x - (1 - G) * (x - y);
    }
  }
}
