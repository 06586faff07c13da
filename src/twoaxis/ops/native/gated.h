// What both kernels of DeepCrossAttention's read share: how their loops are cut.
#pragma once
#include <type_traits>

#include "simd.h"

template <class F>
INLINE void each(int n, F step) {  // as `pairs`, one vector at a time
  int j = 0;
  for (; j + W <= n; j += W) step(j, W);
  if (j < n) step(j, n - j);
}

constexpr int MOST = 8, GROUP = 3;  // tokens, reads at a time
INLINE int tokens(int d) { return d > 256 ? 4 : MOST; }
INLINE float positive(float s) { return s < 0 ? 0 : s; }  // NaN stays

template <class F>
INLINE void groups(int many, F step) {  // step(first, constant size), sizes 1 to GROUP, as even as they can be
  for (int s = 0, left = (many + GROUP - 1) / GROUP, size; s < many; s += size, left--) {
    size = (many - s + left - 1) / left;
    if (size == 3) step(s, std::integral_constant<int, 3>());
    else if (size == 2) step(s, std::integral_constant<int, 2>());
    else step(s, std::integral_constant<int, 1>());
  }
}

template <class F>
INLINE void by_two(int many, F step) {  // step(first, constant size)
  int m = 0;
  for (; m + 2 <= many; m += 2) step(m, std::integral_constant<int, 2>());
  if (m < many) step(m, std::integral_constant<int, 1>());
}
