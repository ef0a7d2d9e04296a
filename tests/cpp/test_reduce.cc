// The kernels of every instruction set this processor has, against plain scalar code.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "reduce/kernels.h"
#include "reduce/reduce.h"

namespace paceline {
namespace {

struct InstructionSet {
  const char* name;
  Reduction (*find)(DType, ReduceOp);
  void (*rescale)(DType, void*, const void*, size_t, double, bool);
};

std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets = {{"portable", portable::find, portable::rescale}};
#ifdef __x86_64__
  const std::string best = instruction_set();
  if (best != "portable") sets.push_back({"avx2", avx2::find, avx2::rescale});
  if (best == "avx512") sets.push_back({"avx512", avx512::find, avx512::rescale});
#endif
  return sets;
}

// Scalar conversions written from the formats' definitions, slowly: by exact arithmetic in double.
double half_to_double(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

// Rounds to nearest, ties to even. The value must be exact in double.
uint16_t double_to_half(double value, int exponent_bits, int mantissa_bits) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const auto infinity = static_cast<uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  if (std::isnan(value)) return static_cast<uint16_t>(infinity | 1 << (mantissa_bits - 1));
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return sign | infinity;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), 1 - bias);
  const double units = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));  // rounds ties to even
  // A carry into the next exponent and the step from subnormal to normal both come out of the addition.
  const int64_t code = (int64_t{exponent + bias - 1} << mantissa_bits) + static_cast<int64_t>(units);
  return sign | static_cast<uint16_t>(std::min<int64_t>(code, infinity));
}

struct Half {
  DType dtype;
  int exponent_bits, mantissa_bits;
  bool nan(uint16_t bits) const { return std::isnan(half_to_double(bits, exponent_bits, mantissa_bits)); }
  double wide(uint16_t bits) const { return half_to_double(bits, exponent_bits, mantissa_bits); }
  uint16_t narrow(double value) const { return double_to_half(value, exponent_bits, mantissa_bits); }
};

constexpr Half kHalves[] = {{DType::kFloat16, 5, 10}, {DType::kBFloat16, 8, 7}};

template <typename T>
T scalar(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
      return a + b;
    case ReduceOp::kProduct:
      if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
      return a * b;
    case ReduceOp::kMin:
      if constexpr (std::is_floating_point_v<T>) {
        if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
      }
      return b < a ? b : a;
    case ReduceOp::kMax:
      if constexpr (std::is_floating_point_v<T>) {
        if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
      }
      return a < b ? b : a;
    default:
      if constexpr (std::is_integral_v<T>) {
        if (op == ReduceOp::kBitAnd) return static_cast<T>(a & b);
        if (op == ReduceOp::kBitOr) return static_cast<T>(a | b);
        return static_cast<T>(a ^ b);
      }
      return {};
  }
}

template <typename T>
bool same(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  }
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <typename T>
T interesting(std::mt19937_64& random) {
  if constexpr (std::is_floating_point_v<T>) {
    using Limits = std::numeric_limits<T>;
    const T special[] = {T{0},
                         -T{0},
                         Limits::infinity(),
                         -Limits::infinity(),
                         Limits::quiet_NaN(),
                         Limits::max(),
                         Limits::lowest(),
                         Limits::denorm_min(),
                         Limits::min(),
                         T{1} / 3};
    const uint64_t choice = random() % 16;
    if (choice < std::size(special)) return special[choice];
    if (choice == 10) return Limits::denorm_min() * static_cast<T>(random() % 1000);
    return static_cast<T>(static_cast<double>(random() % 2000001) / 1000.0 - 1000.0);
  } else {
    const uint64_t choice = random() % 8;
    if (choice == 0) return std::numeric_limits<T>::max();
    if (choice == 1) return std::numeric_limits<T>::min();
    return static_cast<T>(random());
  }
}

constexpr ReduceOp kOps[] = {ReduceOp::kSum,    ReduceOp::kProduct, ReduceOp::kMin,    ReduceOp::kMax,
                             ReduceOp::kBitAnd, ReduceOp::kBitOr,   ReduceOp::kBitXor, ReduceOp::kAverage};

// Every operation, odd counts, every misalignment, out of place and in place.
template <typename T>
void check_plain(DType dtype) {
  std::mt19937_64 random(static_cast<uint64_t>(dtype));
  for (const InstructionSet& set : instruction_sets()) {
    for (const ReduceOp op : kOps) {
      const Reduction reduction = set.find(dtype, op);
      const bool bits = op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor;
      if (bits && std::is_floating_point_v<T>) {
        EXPECT_EQ(reduction, nullptr);
        continue;
      }
      ASSERT_NE(reduction, nullptr) << set.name << " " << name(dtype) << " " << name(op);
      for (const size_t count : {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 257}) {
        for (const size_t shift : {0, 1, 3}) {
          std::vector<T> a(count), b(count);
          for (T& value : a) value = interesting<T>(random);
          for (T& value : b) value = interesting<T>(random);
          // One byte behind the end must survive.
          std::vector<uint8_t> raw_a(count * sizeof(T) + shift + 1, 0xa5), raw_b(raw_a), raw_out(raw_a);
          if (count > 0) std::memcpy(raw_a.data() + shift, a.data(), count * sizeof(T));
          if (count > 0) std::memcpy(raw_b.data() + shift, b.data(), count * sizeof(T));
          reduction(raw_out.data() + shift, raw_a.data() + shift, raw_b.data() + shift, count);
          reduction(raw_a.data() + shift, raw_a.data() + shift, raw_b.data() + shift, count);
          ASSERT_EQ(raw_out.back(), 0xa5);
          ASSERT_EQ(raw_a.back(), 0xa5);
          for (size_t i = 0; i < count; ++i) {
            T out, in_place;
            std::memcpy(&out, raw_out.data() + shift + i * sizeof(T), sizeof(T));
            std::memcpy(&in_place, raw_a.data() + shift + i * sizeof(T), sizeof(T));
            const T expected = scalar(op, a[i], b[i]);
            ASSERT_TRUE(same(out, expected) && same(in_place, expected))
                << set.name << " " << name(dtype) << " " << name(op) << " of " << +a[i] << " and " << +b[i] << ": "
                << +out << ", " << +in_place << " instead of " << +expected;
          }
        }
      }
    }
  }
}

TEST(Reduce, PlainTypes) {
  check_plain<float>(DType::kFloat32);
  check_plain<double>(DType::kFloat64);
  check_plain<int8_t>(DType::kInt8);
  check_plain<int16_t>(DType::kInt16);
  check_plain<int32_t>(DType::kInt32);
  check_plain<int64_t>(DType::kInt64);
  check_plain<uint8_t>(DType::kUInt8);
  check_plain<uint16_t>(DType::kUInt16);
  check_plain<uint32_t>(DType::kUInt32);
  check_plain<uint64_t>(DType::kUInt64);
}

TEST(Reduce, BytesAreNeverReducedAndBoolsHaveNoAverage) {
  for (const InstructionSet& set : instruction_sets()) {
    for (const ReduceOp op : kOps) EXPECT_EQ(set.find(DType::kBytes, op), nullptr);
    EXPECT_EQ(set.find(DType::kBool, ReduceOp::kAverage), nullptr);
    EXPECT_EQ(set.find(static_cast<DType>(200), ReduceOp::kSum), nullptr);
    EXPECT_EQ(set.find(DType::kInt32, static_cast<ReduceOp>(200)), nullptr);
  }
}

// Any byte but zero is true, and the result is zero or one.
TEST(Reduce, Bools) {
  for (const InstructionSet& set : instruction_sets()) {
    for (const ReduceOp op : kOps) {
      if (op == ReduceOp::kAverage) continue;
      for (int a = 0; a < 256; ++a) {
        std::vector<uint8_t> left(256, static_cast<uint8_t>(a)), right(256);
        for (size_t b = 0; b < 256; ++b) right[b] = static_cast<uint8_t>(b);
        set.find(DType::kBool, op)(left.data(), left.data(), right.data(), 256);
        for (size_t b = 0; b < 256; ++b) {
          const bool x = a != 0, y = b != 0;
          const bool either = op == ReduceOp::kSum || op == ReduceOp::kMax || op == ReduceOp::kBitOr;
          const bool expected = either ? x || y : op == ReduceOp::kBitXor ? x != y : x && y;
          ASSERT_EQ(left[b], expected ? 1 : 0) << set.name << " " << name(op);
        }
      }
    }
  }
}

// All 65536 values with a handful of partners: sums are exact in double, so that rounding is checked bit by bit.
TEST(Reduce, HalvesExhaustively) {
  for (const Half& half : kHalves) {
    std::vector<uint16_t> all(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    const uint16_t one = half.narrow(1.0);
    const uint16_t partners[] = {0,
                                 0x8000,
                                 one,
                                 static_cast<uint16_t>(one ^ 0x8000),
                                 1,
                                 half.narrow(1.0 / 3),
                                 half.narrow(1024.5),
                                 static_cast<uint16_t>(one + 1),
                                 half.narrow(std::numeric_limits<double>::infinity()),
                                 half.narrow(std::numeric_limits<double>::quiet_NaN()),
                                 static_cast<uint16_t>(half.narrow(std::numeric_limits<double>::infinity()) - 1)};
    for (const InstructionSet& set : instruction_sets()) {
      for (const uint16_t partner : partners) {
        const std::vector<uint16_t> others(all.size(), partner);
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
          std::vector<uint16_t> out(all.size());
          // One fewer, from an odd address on, so that the tail without vectors has its turn.
          set.find(half.dtype, op)(out.data() + 1, all.data() + 1, others.data() + 1, all.size() - 1);
          for (size_t i = 1; i < all.size(); ++i) {
            const double a = half.wide(all[i]), b = half.wide(partner);
            // Sums and products of two halves are exact in double, and rounding them to float first changes nothing
            // here unless the exponents are far apart: so the expected value takes the same way.
            const double exact = op == ReduceOp::kSum       ? a + b
                                 : op == ReduceOp::kProduct ? a * b
                                                            : scalar<double>(op, a, b);
            const uint16_t expected = half.narrow(static_cast<float>(exact));
            const bool right = half.nan(expected) ? half.nan(out[i]) : out[i] == expected;
            ASSERT_TRUE(right) << set.name << " " << name(half.dtype) << " " << name(op) << " of " << a << " and " << b
                               << ": " << half.wide(out[i]) << " instead of " << half.wide(expected);
          }
        }
      }
      EXPECT_EQ(set.find(half.dtype, ReduceOp::kBitAnd), nullptr);
    }
  }
}

TEST(Reduce, HalvesAtRandomAndUnaligned) {
  std::mt19937_64 random(5);
  for (const Half& half : kHalves) {
    for (const InstructionSet& set : instruction_sets()) {
      for (int round = 0; round < 300; ++round) {
        const size_t count = random() % 70, shift = random() % 3;
        std::vector<uint8_t> a(2 * count + 4), b(2 * count + 4);
        for (uint8_t& byte : a) byte = static_cast<uint8_t>(random());
        for (uint8_t& byte : b) byte = static_cast<uint8_t>(random());
        std::vector<uint8_t> out(a);
        set.find(half.dtype, ReduceOp::kSum)(out.data() + shift, out.data() + shift, b.data() + shift, count);
        for (size_t i = 0; i < count; ++i) {
          uint16_t x, y, z;
          std::memcpy(&x, a.data() + shift + 2 * i, 2);
          std::memcpy(&y, b.data() + shift + 2 * i, 2);
          std::memcpy(&z, out.data() + shift + 2 * i, 2);
          const uint16_t expected = half.narrow(static_cast<float>(half.wide(x) + half.wide(y)));
          ASSERT_TRUE(half.nan(expected) ? half.nan(z) : z == expected) << set.name << " " << name(half.dtype);
        }
        ASSERT_EQ(out.back(), a.back());
      }
    }
  }
}

TEST(Rescale, DividesAndMultiplies) {
  for (const InstructionSet& set : instruction_sets()) {
    for (const Half& half : kHalves) {
      std::vector<uint16_t> all(65536);
      for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
      std::vector<uint16_t> out(all);
      set.rescale(half.dtype, out.data(), all.data(), all.size(), 3, true);
      for (size_t i = 0; i < all.size(); ++i) {
        const uint16_t expected = half.narrow(static_cast<float>(half.wide(all[i])) / 3.0f);
        ASSERT_TRUE(half.nan(expected) ? half.nan(out[i]) : out[i] == expected) << set.name << " " << i;
      }
    }
    const std::vector<float> data = {1, -2, 0, 1e-40f, 3e38f};
    std::vector<float> out(data.size());
    set.rescale(DType::kFloat32, out.data(), data.data(), data.size(), 7, true);
    for (size_t i = 0; i < data.size(); ++i) EXPECT_EQ(out[i], data[i] / 7.0f);
    set.rescale(DType::kFloat32, out.data(), data.data(), data.size(), 0.5, false);
    for (size_t i = 0; i < data.size(); ++i) EXPECT_EQ(out[i], data[i] * 0.5f);
  }
}

// Whole numbers round toward zero, also those that no double holds, and divisors larger than the type.
TEST(Rescale, WholeNumbers) {
  for (const InstructionSet& set : instruction_sets()) {
    std::vector<int64_t> wide = {-7, 7, INT64_MIN, INT64_MAX, (int64_t{1} << 53) + 1};
    set.rescale(DType::kInt64, wide.data(), wide.data(), wide.size(), 2, true);
    EXPECT_EQ(wide, (std::vector<int64_t>{-3, 3, INT64_MIN / 2, INT64_MAX / 2, int64_t{1} << 52}));
    std::vector<int8_t> narrow = {-128, 127, 5};
    set.rescale(DType::kInt8, narrow.data(), narrow.data(), narrow.size(), 300, true);
    EXPECT_EQ(narrow, (std::vector<int8_t>{0, 0, 0}));
    std::vector<uint64_t> natural = {UINT64_MAX};
    set.rescale(DType::kUInt64, natural.data(), natural.data(), 1, 1, true);
    EXPECT_EQ(natural[0], UINT64_MAX);
    std::vector<int64_t> wrapping = {INT64_MAX};
    set.rescale(DType::kInt64, wrapping.data(), wrapping.data(), 1, 2, false);
    EXPECT_EQ(wrapping[0], -2);
  }
}

TEST(Names, OfEverything) {
  for (int i = 0; i < 256; ++i) {
    EXPECT_NE(name(static_cast<DType>(i)), nullptr);
    EXPECT_NE(name(static_cast<ReduceOp>(i)), nullptr);
    EXPECT_GE(element_bytes(static_cast<DType>(i)), 1u);
  }
}

}  // namespace
}  // namespace paceline
