// SHA-256 and HMAC against the vectors of FIPS 180-4's examples and RFC 4231.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/sha256.h"

namespace paceline {
namespace {

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string hex(const Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

TEST(Sha256, KnownVectors) {
  EXPECT_EQ(hex(sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256(bytes("abc"))), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256(bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(std::vector<uint8_t>(1000000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// Lengths around the end of a block, where padding takes one block more: a chain whose end depends on all of them.
TEST(Sha256, LengthsAroundABlock) {
  std::vector<uint8_t> chain;
  for (size_t size = 0; size < 130; ++size) {
    const Digest digest = sha256(std::vector<uint8_t>(size, static_cast<uint8_t>(size)));
    chain.insert(chain.end(), digest.begin(), digest.end());
  }
  EXPECT_EQ(hex(sha256(chain)), "5f8908a7c79bf2d794fd61440e680bde6be7fd0c1f0192bb877dbed657fb7d91");
}

TEST(Hmac, Rfc4231) {
  EXPECT_EQ(hex(hmac_sha256(std::vector<uint8_t>(20, 0x0b), bytes("Hi There"))),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256(bytes("Jefe"), bytes("what do ya want for nothing?"))),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::vector<uint8_t>(20, 0xaa), std::vector<uint8_t>(50, 0xdd))),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  EXPECT_EQ(hex(hmac_sha256(std::vector<uint8_t>(131, 0xaa),
                            bytes("Test Using Larger Than Block-Size Key - Hash Key First"))),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(Hmac, EmptyKeyAndText) {
  EXPECT_EQ(hex(hmac_sha256({}, {})), "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}

TEST(Digests, DifferInEveryByte) {
  const Digest digest = sha256({});
  EXPECT_TRUE(equal_in_constant_time(digest, digest));
  for (size_t i = 0; i < digest.size(); ++i) {
    Digest other = digest;
    other[i] ^= 1;
    EXPECT_FALSE(equal_in_constant_time(digest, other));
  }
}

}  // namespace
}  // namespace paceline
