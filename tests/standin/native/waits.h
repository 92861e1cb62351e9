// How often the host waits for a device, or makes it wait, by cause.
#pragma once

#include <string>

namespace standin {

// Notes one wait; `operator_name` may be empty.
void count_wait(const std::string& cause, const std::string& operator_name = "");

// Called at every wait with its cause and operator, on the thread that waits; null for nothing.
using WaitHook = void (*)(const char* cause, const char* operator_name);
void set_wait_hook(WaitHook hook);

// One line "cause<tab>number" for each cause.
std::string wait_counts(bool reset);

}  // namespace standin
