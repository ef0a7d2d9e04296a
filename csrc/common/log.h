// Log lines of the core, on standard error: what an operator should know, never a line for each collective.
#pragma once

#include <string>

namespace paceline {

enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3, kOff = 4 };

void set_log_level(LogLevel level);
void log(LogLevel level, const std::string& line);

}  // namespace paceline
