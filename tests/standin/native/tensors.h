// Tensors of the device, seen from the host that works on them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <vector>

namespace standin {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::kCUDA;
}

// The memory of a tensor as a tensor of the host, for a thread of a stream. Does not own it: as on
// a GPU, what keeps memory from early reuse is the order of streams.
class Alias {
 public:
  explicit Alias(const at::Tensor& tensor)
      : start_(tensor.numel() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr),
        sizes_(tensor.sizes().vec()),
        strides_(tensor.strides().vec()),
        dtype_(tensor.scalar_type()) {}

  at::Tensor on_host() const {
    return at::from_blob(start_, sizes_, strides_, at::TensorOptions().dtype(dtype_));
  }

 private:
  void* start_;
  std::vector<int64_t> sizes_, strides_;
  at::ScalarType dtype_;
};

}  // namespace standin
