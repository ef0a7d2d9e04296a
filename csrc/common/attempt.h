// For places where nothing may be thrown any further: the clean-up of a group that fails because something was.
#pragma once

namespace paceline {

// Whether it went without an exception.
template <typename Work>
bool attempt(const Work& work) noexcept {
  try {
    work();
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace paceline
