// Which cores a process may use, and on which one a thread is.
#pragma once

#include <vector>

namespace paceline {

std::vector<int> allowed_cores();

// Moves the calling thread to this core, if it is allowed there and elsewhere; afterwards it is as free as before.
void move_to(int core);

}  // namespace paceline
