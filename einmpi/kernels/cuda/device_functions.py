"""What a CUDA kernel can say: the scalar language as C++ functions, each for every type of number.

`DEVICE` is what only a GPU can compile; the rest is plain C++, so that it can be tested without one.
"""

from __future__ import annotations

# No header is included: the compiler needs to find no files.
DEVICE = """\
#define FN static __device__ __forceinline__
struct Half { unsigned short bits; };
struct Brain { unsigned short bits; };
FN float load(Half x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
FN float load(Brain x) { return __int_as_float((int)x.bits << 16); }
FN Half to_half(float x) { Half y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
FN Half to_half(double x) { Half y; asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y.bits) : "d"(x)); return y; }
FN Brain to_brain(float x) {
  unsigned b = __float_as_uint(x);
  unsigned short bits = x != x ? 0x7fc0 | (b >> 16 & 0x8000) : (b + 0x7fff + (b >> 16 & 1)) >> 16;
  return Brain{bits};
}
FN float infinity(float) { return __int_as_float(0x7f800000); }
FN double infinity(double) { return __longlong_as_double(0x7ff0000000000000LL); }
FN float not_a_number(float) { return __int_as_float(0x7fc00000); }
FN double not_a_number(double) { return __longlong_as_double(0x7ff8000000000000LL); }
template <class T> FN T from_lane(T x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
FN bool from_lane(bool x, int mask) { return __shfl_xor_sync(0xffffffffu, (int)x, mask) != 0; }
#if __CUDA_ARCH__ >= 800
FN float greater(float a, float b) { float c; asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
FN float lesser(float a, float b) { float c; asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
#else
FN float greater(float a, float b) { return a > b || a != a ? a : b; }
FN float lesser(float a, float b) { return a < b || a != a ? a : b; }
#endif
"""

# Integers wrap around, which C++ leaves open for those with a sign: they are added and multiplied without one.
COMMON = """\
typedef long long Long;
template <class T> struct Complex { T re, im; };
template <class T, int N> struct alignas(sizeof(T) * N) Pack { T at[N]; };
template <class T> struct Wrap { typedef T type; };
template <> struct Wrap<int> { typedef unsigned type; };
template <> struct Wrap<Long> { typedef unsigned long long type; };
template <class T> struct Real { typedef T type; };
template <class T> struct Real<Complex<T>> { typedef T type; };

// ---- memory: bool as bytes, float16 and bfloat16 computed as float ----
template <class T> FN T load(T x) { return x; }
FN bool load(unsigned char x) { return x != 0; }
template <class S> struct Cell { template <class T> FN S of(T x) { return (S)x; } };
template <> struct Cell<Half> { template <class T> FN Half of(T x) { return to_half((float)x); }
                                FN Half of(double x) { return to_half(x); } };
template <> struct Cell<Brain> { template <class T> FN Brain of(T x) { return to_brain((float)x); } };

// ---- casts ----
template <class T> struct Cast { template <class S> FN T of(S x) { return (T)x; }
                                 template <class S> FN T of(Complex<S> x) { return (T)x.re; } };
template <> struct Cast<bool> { template <class S> FN bool of(S x) { return x != 0; }
                                template <class S> FN bool of(Complex<S> x) { return x.re != 0 || x.im != 0; } };
template <class T> struct Cast<Complex<T>> {
  template <class S> FN Complex<T> of(S x) { return {(T)x, (T)0}; }
  template <class S> FN Complex<T> of(Complex<S> x) { return {(T)x.re, (T)x.im}; } };

// ---- arithmetic ----
template <class T> FN Complex<T> from_lane(Complex<T> x, int mask) {
  return {from_lane(x.re, mask), from_lane(x.im, mask)}; }
template <class T> FN T add(T a, T b) { typedef typename Wrap<T>::type U; return (T)((U)a + (U)b); }
template <class T> FN T sub(T a, T b) { typedef typename Wrap<T>::type U; return (T)((U)a - (U)b); }
template <class T> FN T mul(T a, T b) { typedef typename Wrap<T>::type U; return (T)((U)a * (U)b); }
template <class T> FN T minus(T a) { typedef typename Wrap<T>::type U; return (T)(-(U)a); }
FN bool add(bool a, bool b) { return a | b; }
FN bool mul(bool a, bool b) { return a & b; }
template <class T> FN Complex<T> add(Complex<T> a, Complex<T> b) { return {a.re + b.re, a.im + b.im}; }
template <class T> FN Complex<T> sub(Complex<T> a, Complex<T> b) { return {a.re - b.re, a.im - b.im}; }
template <class T> FN Complex<T> mul(Complex<T> a, Complex<T> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }
template <class T> FN Complex<T> minus(Complex<T> a) { return {-a.re, -a.im}; }
FN float muladd(float a, float b, float c) { return fmaf(a, b, c); }
FN double muladd(double a, double b, double c) { return fma(a, b, c); }
template <class T> FN T divide(T a, T b) { return a / b; }
template <class T> FN Complex<T> divide(Complex<T> a, Complex<T> b) {  // Smith's method
  if ((b.re < 0 ? -b.re : b.re) >= (b.im < 0 ? -b.im : b.im)) {
    if (b.re == 0 && b.im == 0) { T zero = b.re < 0 ? -b.re : b.re; return {a.re / zero, a.im / zero}; }
    T r = b.im / b.re, d = (T)1 / (b.re + b.im * r);
    return {(a.re + a.im * r) * d, (a.im - a.re * r) * d};
  }
  T r = b.re / b.im, d = (T)1 / (b.im + b.re * r);
  return {(a.re * r + a.im) * d, (a.im * r - a.re) * d};
}
template <class T> FN T whole_rest(T a, T b) {
  if (b == 0 || b == -1) return 0;
  T r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
template <class T> FN T rest_of(T a, T b, T r) {
  if (r == 0) return b < 0 || (b == 0 && (T)1 / b < 0) ? -(T)0 : (T)0;
  return (r < 0) != (b < 0) ? r + b : r;
}
FN int rest(int a, int b) { return whole_rest(a, b); }
FN Long rest(Long a, Long b) { return whole_rest(a, b); }
FN float rest(float a, float b) { return rest_of(a, b, fmodf(a, b)); }
FN double rest(double a, double b) { return rest_of(a, b, fmod(a, b)); }
template <class T> FN T whole_power(T a, T b) {
  if (b < 0) return a == 1 ? 1 : a == -1 ? (b & 1 ? -1 : 1) : 0;
  T result = 1;
  for (; b; b >>= 1, a = mul(a, a)) if (b & 1) result = mul(result, a);
  return result;
}
FN int power(int a, int b) { return whole_power(a, b); }
FN Long power(Long a, Long b) { return whole_power(a, b); }
FN float power(float a, float b) { return powf(a, b); }
FN double power(double a, double b) { return pow(a, b); }

// ---- bits, order ----
template <class T> FN T bit_or(T a, T b) { return a | b; }
template <class T> FN T bit_and(T a, T b) { return a & b; }
template <class T> FN T invert(T a) { return ~a; }
FN bool invert(bool a) { return !a; }
template <class T> FN bool less(T a, T b) { return a < b; }
template <class T> FN bool less_equal(T a, T b) { return a <= b; }
template <class T> FN bool more(T a, T b) { return a > b; }
template <class T> FN bool more_equal(T a, T b) { return a >= b; }
template <class T> FN bool equal(T a, T b) { return a == b; }
template <class T> FN bool unequal(T a, T b) { return a != b; }
template <class T> FN bool equal(Complex<T> a, Complex<T> b) { return a.re == b.re && a.im == b.im; }
template <class T> FN bool unequal(Complex<T> a, Complex<T> b) { return !equal(a, b); }
template <class T> FN T pick(bool c, T a, T b) { return c ? a : b; }
template <class T> FN T greater(T a, T b) { return a > b || a != a ? a : b; }  // a nan wins
template <class T> FN T lesser(T a, T b) { return a < b || a != a ? a : b; }
FN bool greater(bool a, bool b) { return a | b; }
FN bool lesser(bool a, bool b) { return a & b; }
template <class T> FN T sign(T a) { return a != a ? a : (T)((a > 0) - (a < 0)); }

// ---- functions ----
#define BOTH(name, one, two) FN float name(float x) { return one(x); } FN double name(double x) { return two(x); }
BOTH(exponential, expf, exp) BOTH(logarithm, logf, log) BOTH(log_plus, log1pf, log1p) BOTH(exp_minus, expm1f, expm1)
BOTH(square_root, sqrtf, sqrt) BOTH(tangent, tanhf, tanh) BOTH(error, erff, erf) BOTH(sine, sinf, sin)
BOTH(cosine, cosf, cos) BOTH(hyper_sine, sinhf, sinh) BOTH(hyper_cosine, coshf, cosh) BOTH(size, fabsf, fabs)
FN float angle(float y, float x) { return atan2f(y, x); }
FN double angle(double y, double x) { return atan2(y, x); }
FN float length(float x, float y) { return hypotf(x, y); }
FN double length(double x, double y) { return hypot(x, y); }
FN bool size(bool a) { return a; }
FN int size(int a) { return a < 0 ? minus(a) : a; }
FN Long size(Long a) { return a < 0 ? minus(a) : a; }
template <class T> FN T size(Complex<T> a) { return length(a.re, a.im); }
template <class T> FN T root_inverse(T x) { return (T)1 / square_root(x); }
template <class T> FN T root_power(T a) { return a == -infinity(a) ? infinity(a) : square_root(a + (T)0); }
template <class T> FN T conjugate(T a) { return a; }
template <class T> FN Complex<T> conjugate(Complex<T> a) { return {a.re, -a.im}; }
template <class T> FN T real(T a) { return a; }
template <class T> FN T real(Complex<T> a) { return a.re; }
template <class T> FN T imaginary(T a) { return (T)0; }
template <class T> FN T imaginary(Complex<T> a) { return a.im; }

// ---- functions of complex numbers ----
template <class T> FN Complex<T> exponential(Complex<T> x) {
  T e = exponential(x.re);
  return x.im == 0 ? Complex<T>{e, x.im} : Complex<T>{e * cosine(x.im), e * sine(x.im)};
}
template <class T> FN Complex<T> logarithm(Complex<T> x) { return {logarithm(size(x)), angle(x.im, x.re)}; }
template <class T> FN Complex<T> log_plus(Complex<T> x) { return logarithm(Complex<T>{x.re + 1, x.im}); }
template <class T> FN Complex<T> exp_minus(Complex<T> x) {
  T s = sine(x.im / 2);
  return {exp_minus(x.re) * cosine(x.im) - 2 * s * s, exponential(x.re) * sine(x.im)};
}
template <class T> FN Complex<T> square_root(Complex<T> x) {
  if (x.re == 0 && x.im == 0) return {(T)0, x.im};
  T half = square_root((size(x) + size(x.re)) / 2), other = x.im / (2 * half);
  if (x.re >= 0) return {half, other};
  return {size(other), x.im < 0 || (x.im == 0 && (T)1 / x.im < 0) ? -half : half};
}
template <class T> FN Complex<T> root_inverse(Complex<T> x) { return divide(Complex<T>{(T)1, (T)0}, square_root(x)); }
template <class T> FN Complex<T> tangent(Complex<T> x) {
  if (size(x.re) > 20) return {x.re < 0 ? (T)-1 : (T)1, 4 * sine(x.im) * cosine(x.im) * exponential(-2 * size(x.re))};
  T s = hyper_sine(x.re), c = cosine(x.im), d = s * s + c * c;
  return {s * hyper_cosine(x.re) / d, sine(x.im) * c / d};
}
template <class T> FN Complex<T> sine(Complex<T> x) {
  return {sine(x.re) * hyper_cosine(x.im), cosine(x.re) * hyper_sine(x.im)}; }
template <class T> FN Complex<T> cosine(Complex<T> x) {
  return {cosine(x.re) * hyper_cosine(x.im), -(sine(x.re) * hyper_sine(x.im))}; }
template <class T> FN Complex<T> power(Complex<T> a, Complex<T> b) {
  if (b.re == 0 && b.im == 0) return {(T)1, (T)0};
  if (a.re == 0 && a.im == 0) {
    T gone = b.re > 0 ? (T)0 : not_a_number(b.re);
    return {gone, gone};
  }
  return exponential(mul(b, logarithm(a)));
}
FN Complex<float> power(Complex<float> a, Complex<float> b) {  // the exponent would lose digits
  return Cast<Complex<float>>::of(power(Cast<Complex<double>>::of(a), Cast<Complex<double>>::of(b))); }

// ---- places ----
// The quotient by a number that the host has prepared: m = ceil(2^s / d), with s so that it is exact below 2^31.
FN int quotient(int x, Long m, Long s) { return (int)(((unsigned long long)x * (unsigned long long)m) >> s); }
FN Long quotient(Long x, Long d, Long) { return x / d; }
template <class I> FN I least(I a, I b) { return a < b ? a : b; }
"""
