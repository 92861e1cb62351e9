// Random numbers: each device has a generator of the host.
#pragma once

#include <ATen/core/Generator.h>

namespace standin {

const at::Generator& generator_of(c10::DeviceIndex device);

}  // namespace standin
