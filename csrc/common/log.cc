#include "common/log.h"

#include <unistd.h>

#include <atomic>

namespace paceline {
namespace {

std::atomic<LogLevel> current{LogLevel::kWarning};

const char* name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    default:
      return "error";
  }
}

}  // namespace

void set_log_level(LogLevel level) { current = level; }

void log(LogLevel level, const std::string& line) {
  if (level < current.load()) return;
  const std::string text = std::string("[paceline ") + name(level) + "] " + line + "\n";
  // One write, so that lines of several ranks on one terminal do not mix.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace paceline
