#include "transport/multicast/authentication.h"

#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/sha256.h"
#include "transport/bytes.h"

namespace paceline {
namespace {

// The part of libcrypto's interface that is needed, which is the same in 1.1 and 3. It is declared here, so that its
// headers are not needed to build, and found at run time, so that everything but multicast works without it.
struct Libcrypto {
  const void* (*aes_128_gcm)() = nullptr;
  void* (*new_context)() = nullptr;
  void (*free_context)(void*) = nullptr;
  int (*control)(void* context, int type, int number, void* pointer) = nullptr;
  int (*init)(void* context, const void* cipher, void* engine, const uint8_t* key, const uint8_t* nonce) = nullptr;
  int (*update)(void* context, uint8_t* out, int* written, const uint8_t* in, int bytes) = nullptr;
  int (*finish)(void* context, uint8_t* out, int* written) = nullptr;
};
constexpr int kGetTag = 0x10;                       // EVP_CTRL_AEAD_GET_TAG
constexpr uint64_t kNoCleanupAtExit = 0x00080000L;  // OPENSSL_INIT_NO_ATEXIT

template <typename Function>
void find(void* library, const char* name, Function* function) {
  void* const symbol = ::dlsym(library, name);
  if (symbol == nullptr) throw std::runtime_error(std::string("multicast: libcrypto has no ") + name);
  *function = reinterpret_cast<Function>(symbol);
}

Libcrypto load() {
  void* library = nullptr;
  for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1"}) {
    if (library == nullptr) library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) {
    throw std::runtime_error(
        "multicast authenticates its packets by OpenSSL's libcrypto, and neither libcrypto.so.3 nor libcrypto.so.1.1 "
        "was "
        "found: install it (apt-get install libssl3)");
  }
  Libcrypto found;
  find(library, "EVP_aes_128_gcm", &found.aes_128_gcm);
  find(library, "EVP_CIPHER_CTX_new", &found.new_context);
  find(library, "EVP_CIPHER_CTX_free", &found.free_context);
  find(library, "EVP_CIPHER_CTX_ctrl", &found.control);
  find(library, "EVP_EncryptInit_ex", &found.init);
  find(library, "EVP_EncryptUpdate", &found.update);
  find(library, "EVP_EncryptFinal_ex", &found.finish);
  // Threads may still be at work when the process ends: the library is not to be taken away from under them.
  int (*initialise)(uint64_t options, const void* settings) = nullptr;
  find(library, "OPENSSL_init_crypto", &initialise);
  initialise(kNoCleanupAtExit, nullptr);
  return found;
}

const Libcrypto& libcrypto() {
  static const Libcrypto loaded = load();  // tried again where it failed
  return loaded;
}

Digest derive(const Secret& secret, const std::string& purpose, const GroupId& group, uint32_t rank) {
  std::vector<uint8_t> text(purpose.begin(), purpose.end());
  text.insert(text.end(), group.begin(), group.end());
  text.resize(text.size() + sizeof(rank));
  ByteWriter(text.data() + text.size() - sizeof(rank)).put(rank);
  return hmac_sha256(secret, text);
}

}  // namespace

PacketKey packet_key(const Secret& secret, const GroupId& group, uint32_t sender) {
  const Digest digest = derive(secret, "paceline multicast packets", group, sender);
  PacketKey key;
  std::copy_n(digest.begin(), key.size(), key.begin());
  return key;
}

uint32_t group_mark(const Secret& secret, const GroupId& group) {
  return ByteReader(derive(secret, "paceline multicast group", group, 0).data()).get<uint32_t>();
}

void Authenticator::Free::operator()(void* context) const { libcrypto().free_context(context); }

Authenticator::Authenticator(const PacketKey& key) : context_(libcrypto().new_context()) {
  if (context_ == nullptr ||
      libcrypto().init(context_.get(), libcrypto().aes_128_gcm(), nullptr, key.data(), nullptr) != 1) {
    throw std::runtime_error("multicast: libcrypto does not offer AES-128-GCM");
  }
}

Tag Authenticator::tag(std::span<const uint8_t> header, std::span<const uint8_t> payload) {
  const Libcrypto& crypto = libcrypto();
  void* const context = context_.get();
  Tag tag;
  int written = 0;
  // Bytes without a place to write to are authenticated only.
  if (crypto.init(context, nullptr, nullptr, nullptr, header.data() + kNonceAt) != 1 ||
      crypto.update(context, nullptr, &written, header.data(), static_cast<int>(header.size())) != 1 ||
      (!payload.empty() &&
       crypto.update(context, nullptr, &written, payload.data(), static_cast<int>(payload.size())) != 1) ||
      crypto.finish(context, tag.data(), &written) != 1 ||
      crypto.control(context, kGetTag, static_cast<int>(tag.size()), tag.data()) != 1) {
    throw std::runtime_error("multicast: libcrypto cannot make a tag");
  }
  return tag;
}

bool Authenticator::genuine(std::span<const uint8_t> packet) {
  const std::span<const uint8_t> claimed = packet.last(kTagBytes);
  const Tag right = tag(packet.first(packet.size() - kTagBytes), {});
  uint8_t difference = 0;  // not until the first difference: that would tell a forger how far it was right
  for (size_t i = 0; i < kTagBytes; ++i) difference |= right[i] ^ claimed[i];
  return difference == 0;
}

void Nonces::next(PacketHeader* header) {
  if (left_ == 0) {
    const Nonce random = random_nonce();
    salt_ = ByteReader(random.data()).get<uint64_t>();
    left_ = uint64_t{1} << 32;
  }
  header->salt = salt_;
  header->counter = static_cast<uint32_t>(--left_);
}

}  // namespace paceline
