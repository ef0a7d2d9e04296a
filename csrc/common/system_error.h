// Errors of the system, in words that say what to do where that is known.
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

namespace paceline {

inline bool out_of_files(int error) { return error == EMFILE || error == ENFILE; }

constexpr const char* kOutOfFiles = "too many open files (ulimit -n)";

[[noreturn]] inline void fail(const std::string& what, int error = errno) {
  throw std::system_error(error, std::generic_category(), out_of_files(error) ? what + " (ulimit -n)" : what);
}

}  // namespace paceline
