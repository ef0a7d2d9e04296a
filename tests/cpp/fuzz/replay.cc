// A main() for compilers without libFuzzer: runs the corpus, then random mutations of it until FUZZ_SECONDS are over.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  std::vector<std::vector<uint8_t>> corpus = {{}};
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      std::ifstream file(entry.path(), std::ios::binary);
      corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
  }
  for (const auto& bytes : corpus) LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  const char* const text = std::getenv("FUZZ_SECONDS");
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(text != nullptr ? std::atoi(text) : 10);
  std::mt19937 random(1);
  uint64_t runs = 0;
  for (; std::chrono::steady_clock::now() < until; ++runs) {
    std::vector<uint8_t> bytes = corpus[random() % corpus.size()];
    for (uint32_t changes = random() % 6; changes-- > 0;) {
      if (bytes.empty() || random() % 4 == 0) {
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(random() % (bytes.size() + 1)),
                     static_cast<uint8_t>(random()));
      } else if (random() % 4 == 0) {
        bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(random() % bytes.size()));
      } else {
        bytes[random() % bytes.size()] = static_cast<uint8_t>(random() % 3 == 0 ? random() % 12 : random());
      }
    }
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%zu inputs of the corpus and %llu mutations\n", corpus.size(), static_cast<unsigned long long>(runs));
  return 0;
}
