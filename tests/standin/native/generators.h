// Random numbers: each device has a generator of the host, which seeds that of every operator when
// it is queued. So its state is known without waiting for the device, as CUDA's is.
#pragma once

#include <ATen/core/Generator.h>

namespace standin {

const at::Generator& generator_of(c10::DeviceIndex device);
at::Generator seeded_by(at::Generator generator);

}  // namespace standin
