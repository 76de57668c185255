"""The C++ functions of CUDA kernels: the operations, each for every type of number.

Only `DEVICE` needs a GPU's compiler; `COMMON` is plain C++, which is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from einmpi.graph import random_numbers
from einmpi.graph.operations import OPERATIONS

# No header is included, so that the compiler needs to find no files.
DEVICE = """\
#define FN static __device__ __forceinline__
struct Half { unsigned short bits; };
struct Brain { unsigned short bits; };
FN float load(Half x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
FN float load(Brain x) { return __int_as_float((int)x.bits << 16); }
FN Half to_half(float x) {
  Half y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
FN Half to_half(double x) {
  Half y; asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y.bits) : "d"(x)); return y; }
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
FN float maximum_(float a, float b) {
  float c; asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
FN float minimum_(float a, float b) {
  float c; asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
#else
FN float maximum_(float a, float b) { return a > b || a != a ? a : b; }
FN float minimum_(float a, float b) { return a < b || a != a ? a : b; }
#endif
"""

# Integers wrap around. C++ leaves that open for signed ones, so they are computed as unsigned.
COMMON = """\
typedef long long Long;
typedef unsigned long long ULong;
struct Truth { unsigned char byte; };
template <class T> struct Complex { T re, im; };
template <class T, int N> struct alignas(sizeof(T) * N) Pack { T at[N]; };
template <class T> struct Wrap { typedef T type; };
template <> struct Wrap<signed char> { typedef unsigned type; };
template <> struct Wrap<short> { typedef unsigned type; };
template <> struct Wrap<int> { typedef unsigned type; };
template <> struct Wrap<Long> { typedef ULong type; };
template <> struct Wrap<unsigned char> { typedef unsigned type; };
template <> struct Wrap<unsigned short> { typedef unsigned type; };
template <class T> struct Real { typedef T type; };
template <class T> struct Real<Complex<T>> { typedef T type; };

// ---- memory: bool as bytes, float16 and bfloat16 computed as float ----
template <class T> FN T load(T x) { return x; }
FN bool load(Truth x) { return x.byte != 0; }
template <class S> struct Cell { template <class T> FN S of(T x) { return (S)x; } };
template <> struct Cell<Truth> { FN Truth of(bool x) { return Truth{(unsigned char)x}; } };
template <> struct Cell<Half> { template <class T> FN Half of(T x) { return to_half((float)x); }
                                FN Half of(double x) { return to_half(x); } };
template <> struct Cell<Brain> {
  template <class T> FN Brain of(T x) { return to_brain((float)x); } };

// ---- casts ----
template <class T> struct Cast { template <class S> FN T of(S x) { return (T)x; }
                                 template <class S> FN T of(Complex<S> x) { return (T)x.re; } };
template <> struct Cast<bool> {
  template <class S> FN bool of(S x) { return x != 0; }
  template <class S> FN bool of(Complex<S> x) { return x.re != 0 || x.im != 0; } };
// Outside of an integer's range: the nearest integer in it, and 0 for nan.
template <class T, class S> FN T whole(S x, S bottom, S top, T least, T greatest) {
  if (x >= top) return greatest;
  if (x <= bottom) return least;
  return x == x ? (T)x : 0; }
#define WHOLE(T, bottom, top, least, greatest) \
  template <> struct Cast<T> { \
    template <class S> FN T of(S x) { return (T)x; } \
    FN T of(float x) { return whole<T, float>(x, bottom, top, (T)least, (T)greatest); } \
    FN T of(double x) { return whole<T, double>(x, bottom, top, (T)least, (T)greatest); } };
WHOLE(signed char, -0x1p7, 0x1p7, -128, 127)
WHOLE(short, -0x1p15, 0x1p15, -32768, 32767)
WHOLE(int, -0x1p31, 0x1p31, 0x80000000u, 0x7fffffff)
WHOLE(Long, -0x1p63, 0x1p63, 0x8000000000000000ULL, 0x7fffffffffffffffLL)
WHOLE(unsigned char, 0, 0x1p8, 0, 255)
WHOLE(unsigned short, 0, 0x1p16, 0, 65535)
WHOLE(unsigned, 0, 0x1p32, 0, 0xffffffffu)
WHOLE(ULong, 0, 0x1p64, 0, 0xffffffffffffffffULL)
template <class T> struct Cast<Complex<T>> {
  template <class S> FN Complex<T> of(S x) { return {(T)x, (T)0}; }
  template <class S> FN Complex<T> of(Complex<S> x) { return {(T)x.re, (T)x.im}; } };

// ---- rounding ----
FN float floor_(float x) { return floorf(x); }
FN double floor_(double x) { return floor(x); }
FN float ceil_(float x) { return ceilf(x); }
FN double ceil_(double x) { return ceil(x); }
FN float round_(float x) { return rintf(x); }
FN double round_(double x) { return rint(x); }
template <class T> FN T floor_(T x) { return x; }  // bools and integers
template <class T> FN T ceil_(T x) { return x; }
template <class T> FN T round_(T x) { return x; }
template <class T> FN Complex<T> round_(Complex<T> x) { return {round_(x.re), round_(x.im)}; }

// ---- arithmetic ----
template <class T> FN Complex<T> from_lane(Complex<T> x, int mask) {
  return {from_lane(x.re, mask), from_lane(x.im, mask)}; }
template <class T> FN T add(T a, T b) { typedef typename Wrap<T>::type U; return (T)((U)a + (U)b); }
template <class T> FN T sub(T a, T b) { typedef typename Wrap<T>::type U; return (T)((U)a - (U)b); }
template <class T> FN T mul(T a, T b) { typedef typename Wrap<T>::type U; return (T)((U)a * (U)b); }
template <class T> FN T minus(T a) { typedef typename Wrap<T>::type U; return (T)(-(U)a); }
// ptxas 13.0 takes the product of t and the short -a for -(t × a), also where -a is a again: an asm
// statement hides from it where the number comes from.
FN short narrow(unsigned x) { asm volatile("" : "+r"(x)); return (short)x; }
FN short sub(short a, short b) { return narrow((unsigned)a - (unsigned)b); }
FN short mul(short a, short b) { return narrow((unsigned)a * (unsigned)b); }
FN short minus(short a) { return narrow(-(unsigned)a); }
FN bool add(bool a, bool b) { return a | b; }
FN bool mul(bool a, bool b) { return a & b; }
template <class T> FN Complex<T> add(Complex<T> a, Complex<T> b) {
  return {a.re + b.re, a.im + b.im}; }
template <class T> FN Complex<T> sub(Complex<T> a, Complex<T> b) {
  return {a.re - b.re, a.im - b.im}; }
template <class T> FN Complex<T> mul(Complex<T> a, Complex<T> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }
template <class T> FN Complex<T> minus(Complex<T> a) { return {-a.re, -a.im}; }
FN float muladd(float a, float b, float c) { return fmaf(a, b, c); }
FN double muladd(double a, double b, double c) { return fma(a, b, c); }
template <class T> FN T divide(T a, T b) { return a / b; }
template <class T> FN Complex<T> divide(Complex<T> a, Complex<T> b) {  // Smith's method
  if ((b.re < 0 ? -b.re : b.re) >= (b.im < 0 ? -b.im : b.im)) {
    if (b.re == 0 && b.im == 0) {
      T zero = b.re < 0 ? -b.re : b.re;
      return {a.re / zero, a.im / zero};
    }
    T r = b.im / b.re, d = (T)1 / (b.re + b.im * r);
    return {(a.re + a.im * r) * d, (a.im - a.re * r) * d};
  }
  T r = b.re / b.im, d = (T)1 / (b.im + b.re * r);
  return {(a.re * r + a.im) * d, (a.im * r - a.re) * d};
}
template <class T> FN T integer_remainder(T a, T b) {
  if (b == 0 || b == (T)-1 && (T)-1 < 0) return 0;
  T r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
template <class T> FN T signed_remainder(T a, T b, T r) {
  if (r == 0) return b < 0 || (b == 0 && (T)1 / b < 0) ? -(T)0 : (T)0;
  return (r < 0) != (b < 0) ? r + b : r;
}
template <class T> FN T remainder_(T a, T b) { return integer_remainder(a, b); }
FN float remainder_(float a, float b) { return signed_remainder(a, b, fmodf(a, b)); }
FN double remainder_(double a, double b) { return signed_remainder(a, b, fmod(a, b)); }
// numpy subtracts the remainder first, so that the quotient is whole up to rounding.
template <class T> FN T rounded_down(T a, T b, T r, T quotient) {
  if (b == 0) return quotient;
  T q = (a - r) / b;
  if (r != 0 && (r < 0) != (b < 0)) q -= 1;
  if (q == 0) return quotient < 0 || (quotient == 0 && (T)1 / quotient < 0) ? -(T)0 : (T)0;
  T down = floor_(q);
  return q - down > (T)0.5 ? down + 1 : down;
}
template <class T> FN T integer_quotient(T a, T b) {
  if (b == 0) return 0;
  if (b == (T)-1 && (T)-1 < 0) return minus(a);
  return a % b != 0 && (a < 0) != (b < 0) ? a / b - 1 : a / b;
}
template <class T> FN T floor_divide(T a, T b) { return integer_quotient(a, b); }
FN float floor_divide(float a, float b) { return rounded_down(a, b, fmodf(a, b), a / b); }
FN double floor_divide(double a, double b) { return rounded_down(a, b, fmod(a, b), a / b); }
template <class T> FN T integer_power(T a, T b) {
  if (b < 0) return a == 1 ? 1 : a == (T)-1 ? (b & 1 ? -1 : 1) : 0;
  T result = 1;
  for (; b; b >>= 1, a = mul(a, a)) if (b & 1) result = mul(result, a);
  return result;
}
template <class T> FN T power(T a, T b) { return integer_power(a, b); }
FN float power(float a, float b) { return powf(a, b); }
FN double power(double a, double b) { return pow(a, b); }

// ---- bits, order ----
template <class T> FN T bit_or(T a, T b) { return a | b; }
template <class T> FN T bit_and(T a, T b) { return a & b; }
template <class T> FN T bit_xor(T a, T b) { return a ^ b; }
template <class T> FN T shift_left(T a, T b) {
  return (ULong)b < 8 * sizeof(T) ? (T)((ULong)a << b) : (T)0;
}
template <class T> FN T shift_right(T a, T b) {
  return (ULong)b < 8 * sizeof(T) ? a >> b : a >> (8 * sizeof(T) - 1) >> 1;
}
template <class T> FN T invert(T a) { return ~a; }
FN bool invert(bool a) { return !a; }
template <class T> FN bool less(T a, T b) { return a < b; }
template <class T> FN bool less_equal(T a, T b) { return a <= b; }
template <class T> FN bool greater(T a, T b) { return a > b; }
template <class T> FN bool greater_equal(T a, T b) { return a >= b; }
template <class T> FN bool equal(T a, T b) { return a == b; }
template <class T> FN bool not_equal(T a, T b) { return a != b; }
// Integers of different signs are compared as the numbers that they are.
FN bool less(ULong a, Long b) { return b >= 0 && a < (ULong)b; }
FN bool less(Long a, ULong b) { return a < 0 || (ULong)a < b; }
FN bool less_equal(ULong a, Long b) { return b >= 0 && a <= (ULong)b; }
FN bool less_equal(Long a, ULong b) { return a < 0 || (ULong)a <= b; }
FN bool greater(ULong a, Long b) { return less(b, a); }
FN bool greater(Long a, ULong b) { return less(b, a); }
FN bool greater_equal(ULong a, Long b) { return less_equal(b, a); }
FN bool greater_equal(Long a, ULong b) { return less_equal(b, a); }
FN bool equal(ULong a, Long b) { return b >= 0 && a == (ULong)b; }
FN bool equal(Long a, ULong b) { return equal(b, a); }
FN bool not_equal(ULong a, Long b) { return !equal(a, b); }
FN bool not_equal(Long a, ULong b) { return !equal(a, b); }
template <class T> FN bool equal(Complex<T> a, Complex<T> b) {
  return a.re == b.re && a.im == b.im; }
template <class T> FN bool not_equal(Complex<T> a, Complex<T> b) { return !equal(a, b); }
template <class T> FN T pick(bool c, T a, T b) { return c ? a : b; }
template <class T> FN T maximum_(T a, T b) { return a > b || a != a ? a : b; }  // a nan wins
template <class T> FN T minimum_(T a, T b) { return a < b || a != a ? a : b; }
FN bool maximum_(bool a, bool b) { return a | b; }
FN bool minimum_(bool a, bool b) { return a & b; }
template <class T> FN bool isnan_(T a) { return a != a; }
template <class T> FN bool isnan_(Complex<T> a) { return a.re != a.re || a.im != a.im; }
template <class T> FN bool isfinite_(T a) { return a - a == 0; }
template <class T> FN bool isfinite_(Complex<T> a) { return isfinite_(a.re) && isfinite_(a.im); }
template <class T> FN T sign_(T a) { return a != a ? a : (T)((a > 0) - (a < 0)); }

// ---- functions ----
#define BOTH(name, one, two) \\
  FN float name(float x) { return one(x); } FN double name(double x) { return two(x); }
BOTH(exp_, expf, exp) BOTH(log_, logf, log) BOTH(log1p_, log1pf, log1p) BOTH(expm1_, expm1f, expm1)
BOTH(sqrt_, sqrtf, sqrt) BOTH(tanh_, tanhf, tanh) BOTH(erf_, erff, erf) BOTH(sin_, sinf, sin)
BOTH(cos_, cosf, cos) BOTH(sinh_, sinhf, sinh) BOTH(cosh_, coshf, cosh) BOTH(abs_, fabsf, fabs)
BOTH(tan_, tanf, tan) BOTH(log2_, log2f, log2) BOTH(log10_, log10f, log10)
FN float arctan2_(float y, float x) { return atan2f(y, x); }
FN double arctan2_(double y, double x) { return atan2(y, x); }
FN float hypot_(float x, float y) { return hypotf(x, y); }
FN double hypot_(double x, double y) { return hypot(x, y); }
FN bool abs_(bool a) { return a; }
template <class T> FN T abs_(T a) { return a < 0 ? minus(a) : a; }
template <class T> FN T abs_(Complex<T> a) { return hypot_(a.re, a.im); }
template <class T> FN T rsqrt_(T x) { return (T)1 / sqrt_(x); }
template <class T> FN T sigmoid_(T x) {
  T e = exp_(-abs_(x));
  return (x >= 0 ? (T)1 : e) / (1 + e);
}
template <class T> FN T root_power(T a) {
  return a == -infinity(a) ? infinity(a) : sqrt_(a + (T)0); }
template <class T> FN T conj_(T a) { return a; }
template <class T> FN Complex<T> conj_(Complex<T> a) { return {a.re, -a.im}; }
template <class T> FN T real_(T a) { return a; }
template <class T> FN T real_(Complex<T> a) { return a.re; }
template <class T> FN T imag_(T a) { return (T)0; }
template <class T> FN T imag_(Complex<T> a) { return a.im; }

// ---- functions of complex numbers ----
template <class T> FN Complex<T> exp_(Complex<T> x) {
  T e = exp_(x.re);
  return x.im == 0 ? Complex<T>{e, x.im} : Complex<T>{e * cos_(x.im), e * sin_(x.im)};
}
template <class T> FN Complex<T> log_(Complex<T> x) {
  return {log_(abs_(x)), arctan2_(x.im, x.re)}; }
template <class T> FN Complex<T> log2_(Complex<T> x) {
  return mul(log_(x), Complex<T>{(T)1.4426950408889634, (T)0}); }
template <class T> FN Complex<T> log10_(Complex<T> x) {
  return mul(log_(x), Complex<T>{(T)0.4342944819032518, (T)0}); }
template <class T> FN Complex<T> log1p_(Complex<T> x) { return log_(Complex<T>{x.re + 1, x.im}); }
template <class T> FN Complex<T> expm1_(Complex<T> x) {
  T s = sin_(x.im / 2);
  return {expm1_(x.re) * cos_(x.im) - 2 * s * s, exp_(x.re) * sin_(x.im)};
}
template <class T> FN Complex<T> sqrt_(Complex<T> x) {
  if (x.re == 0 && x.im == 0) return {(T)0, x.im};
  T half = sqrt_((abs_(x) + abs_(x.re)) / 2), other = x.im / (2 * half);
  if (x.re >= 0) return {half, other};
  return {abs_(other), x.im < 0 || (x.im == 0 && (T)1 / x.im < 0) ? -half : half};
}
template <class T> FN Complex<T> rsqrt_(Complex<T> x) {
  return divide(Complex<T>{(T)1, (T)0}, sqrt_(x)); }
template <class T> FN Complex<T> tanh_(Complex<T> x) {
  if (abs_(x.re) > 20)
    return {x.re < 0 ? (T)-1 : (T)1, 4 * sin_(x.im) * cos_(x.im) * exp_(-2 * abs_(x.re))};
  T s = sinh_(x.re), c = cos_(x.im), d = s * s + c * c;
  return {s * cosh_(x.re) / d, sin_(x.im) * c / d};
}
template <class T> FN Complex<T> sin_(Complex<T> x) {
  return {sin_(x.re) * cosh_(x.im), cos_(x.re) * sinh_(x.im)}; }
template <class T> FN Complex<T> cos_(Complex<T> x) {
  return {cos_(x.re) * cosh_(x.im), -(sin_(x.re) * sinh_(x.im))}; }
template <class T> FN Complex<T> tan_(Complex<T> x) {  // −i tanh(ix)
  Complex<T> t = tanh_(Complex<T>{-x.im, x.re});
  return {t.im, -t.re};
}
template <class T> FN Complex<T> sinh_(Complex<T> x) {
  return {sinh_(x.re) * cos_(x.im), cosh_(x.re) * sin_(x.im)}; }
template <class T> FN Complex<T> cosh_(Complex<T> x) {
  return {cosh_(x.re) * cos_(x.im), sinh_(x.re) * sin_(x.im)}; }
template <class T> FN Complex<T> sigmoid_(Complex<T> x) {
  Complex<T> one = {(T)1, (T)0}, e = exp_(x.re >= 0 ? minus(x) : x);
  return divide(x.re >= 0 ? one : e, add(one, e));
}
template <class T> FN Complex<T> power(Complex<T> a, Complex<T> b) {
  if (b.re == 0 && b.im == 0) return {(T)1, (T)0};
  if (a.re == 0 && a.im == 0) {
    T gone = b.re > 0 ? (T)0 : not_a_number(b.re);
    return {gone, gone};
  }
  return exp_(mul(b, log_(a)));
}
FN Complex<float> power(Complex<float> a, Complex<float> b) {  // the exponent would lose digits
  typedef Cast<Complex<double>> Wide;
  return Cast<Complex<float>>::of(power(Wide::of(a), Wide::of(b))); }

// ---- places ----
// The quotient by a divisor d that the host has prepared: m = ceil(2^s / d), with s such that it
// is exact below 2^31.
FN int quotient(int x, Long m, Long s) {
  return (int)(((unsigned long long)x * (unsigned long long)m) >> s); }
FN Long quotient(Long x, Long d, Long) { return x / d; }
template <class I> FN I least(I a, I b) { return a < b ? a : b; }
"""


# ---- random numbers ------------------------------------------------------------------------------


def _series(name: str, coefficients: Sequence[float]) -> str:
    """Return a function for Σ aₖ xᵏ, in pairs of pairs as `random_numbers` computes it."""
    terms = [f"({coefficient.hex()})" for coefficient in coefficients]
    lines = f"FN double {name}(double x) {{\n"
    power = "x"
    while len(terms) > 1:
        pairs = [f"({power} * {b} + {a})" for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[len(pairs) * 2 :]
        lines += f"  double {power}x = {power} * {power};\n"
        power += "x"
    return f"{lines}  return {terms[0]};\n}}\n"


def _random_source() -> str:
    """Return the formulas of `random_numbers` in C++."""
    multipliers = random_numbers.MULTIPLIERS
    key_steps = random_numbers.KEY_STEPS
    minus_two_log_2 = random_numbers.MINUS_TWO_LOG_2.hex()
    (shift, factor), (next_shift, next_factor) = random_numbers.MIX
    return f"""
// ---- random numbers ----
struct Bits {{ ULong first, second; }};
union DoubleBits {{ double number; ULong bits; }};
FN Bits philox(ULong first, ULong second, ULong key) {{
  unsigned a = (unsigned)first, b = (unsigned)(first >> 32), k = (unsigned)key;
  unsigned c = (unsigned)second, d = (unsigned)(second >> 32), l = (unsigned)(key >> 32);
  for (int round = 0; round < {random_numbers.ROUNDS}; ++round) {{
    ULong p = a * {multipliers[0]}ULL, q = c * {multipliers[1]}ULL;
    a = (unsigned)(q >> 32) ^ b ^ k; b = (unsigned)q; k += {key_steps[0]}u;
    c = (unsigned)(p >> 32) ^ d ^ l; d = (unsigned)p; l += {key_steps[1]}u;
  }}
  return {{a | (ULong)b << 32, c | (ULong)d << 32}};
}}
FN ULong mixed(ULong x) {{
  x = (x ^ x >> {shift}) * {factor}ULL;
  x = (x ^ x >> {next_shift}) * {next_factor}ULL;
  return x ^ x >> {random_numbers.MIX_LAST};
}}
FN Bits keyed_bits(ULong key, ULong a = 0, ULong b = 0) {{ return philox(a, b, key); }}
template <class... V> FN Bits keyed_bits(ULong key, ULong a, ULong b, ULong c, V... values) {{
  return keyed_bits(mixed(a * {random_numbers.GOLDEN}ULL + key), b, c, values...); }}
template <class... V> FN Bits random_bits(int purpose, Long seed, V... values) {{
  ULong code = purpose + 4 * sizeof...(V);
  return keyed_bits(mixed((ULong)seed + code * {random_numbers.GOLDEN}ULL), (ULong)values...); }}
template <class... V> FN double random_uniform(int purpose, V... values) {{
  return (double)(random_bits(purpose, values...).first >> 11) * 0x1p-53; }}
template <class... V> FN float random_uniform32(int purpose, V... values) {{
  return (float)(random_bits(purpose, values...).first >> 40) * 0x1p-24f; }}
{_series("log_series", random_numbers.LOG_SERIES)}\
{_series("sine_series", random_numbers.SCALED_SINE_SERIES)}\
template <class... V> FN double random_normal(int purpose, V... values) {{
  Bits random = random_bits(purpose, values...);
  DoubleBits x, m;
  x.number = (double)((random.first >> 11) + 1);
  x.bits += {random_numbers.LOG_SHIFT}ULL;
  m.bits = (x.bits & {random_numbers.FRACTION_BITS}ULL) + {random_numbers.ROOT_HALF_BITS}ULL;
  double f = m.number - 1.0, s = f / (f + 2.0), square = s * s;
  double k = (double)((Long)x.bits >> 52);
  double logs = (log_series(square) * square - 4.0) * s + k * {minus_two_log_2};
  double t = (double)((Long)random.second >> 11);
  return sqrt_(logs) * (sine_series(t * t) * t);
}}
"""


COMMON += _random_source()


def device_source() -> str:
    """Return the C++ text that precedes every kernel, with the sources of registered operations."""
    sources = [operation.cuda_source for operation in OPERATIONS.values()]
    return DEVICE + COMMON + "".join(sources)
