// Kernels of the device's own: memory, views, copies, and what the host reads.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/TensorOperators.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <tuple>

#include "memory.h"
#include "streams.h"
#include "tensors.h"
#include "waits.h"

namespace standin {

namespace {

using at::Tensor;
using c10::IntArrayRef;
using std::optional;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

// Memory ------------------------------------------------------------------------------------------

Tensor empty(IntArrayRef sizes, optional<at::ScalarType> dtype, optional<at::Layout>,
             optional<c10::Device> device, optional<bool>, optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(sizes, &device_allocator(), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, optional<at::ScalarType> dtype,
                     optional<at::Layout>, optional<c10::Device> device, optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

void grow(c10::Storage storage, size_t num_bytes, c10::Device device) {
  c10::DeviceGuard guard(device);
  c10::DataPtr larger = device_allocator().allocate(num_bytes);
  size_t before = storage.nbytes();
  if (before) {
    enqueue(current_stream(device.index()), "resize", Kind::kWork,
            [to = larger.get(), from = storage.data(), before] { std::memcpy(to, from, before); });
  }
  storage.set_data_ptr_noswap(std::move(larger));
  storage.set_nbytes(num_bytes);
}

const Tensor& resize(const Tensor& self, IntArrayRef sizes, optional<at::MemoryFormat> format) {
  int64_t num_elements = self.storage_offset();
  num_elements += c10::multiply_integers(sizes);
  size_t num_bytes = num_elements * self.element_size();
  if (num_bytes > self.storage().nbytes()) grow(self.storage(), num_bytes, self.device());
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef sizes,
                    IntArrayRef strides) {
  c10::TensorImpl* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_storage_offset(offset);
  if (strides.empty() && !sizes.empty()) {
    tensor->set_sizes_contiguous(sizes);
  } else {
    tensor->set_sizes_and_strides(sizes, strides);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  auto num_elements = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_storage(self, std::move(storage), 0, {num_elements}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

void record_stream(Tensor& self, c10::Stream stream) {
  record_use(self.storage().data_ptr(), stream);
}

// Copies ------------------------------------------------------------------------------------------

// Reading and writing wait for both streams, on the streams.
void copy_on_devices(const Tensor& to, const Tensor& from) {
  c10::Stream reading = current_stream(from.device().index());
  c10::Stream writing = current_stream(to.device().index());
  if (reading != writing) wait_in_stream(reading, record(writing));
  enqueue(reading, "copy", Kind::kWork,
          [a = Alias(to), b = Alias(from)] { a.on_host().copy_(b.on_host()); });
  if (reading != writing) wait_in_stream(writing, record(reading));
}

// Only from pinned memory does the host go on before the data were read.
void copy_to_device(const Tensor& to, const Tensor& from, bool non_blocking) {
  c10::Stream stream = current_stream(to.device().index());
  const void* memory = from.storage().data();
  bool is_pinned = standin::is_pinned(memory);
  if (is_pinned && non_blocking) {
    enqueue(stream, "copy to the device", Kind::kWork,
            [a = Alias(to), b = Alias(from)] { a.on_host().copy_(b.on_host()); });
    keep_pinned_until(memory, record(stream));
    return;
  }
  enqueue(stream, "copy to the device", Kind::kWork,
          [a = Alias(to), b = from.clone()] { a.on_host().copy_(b); });
  if (non_blocking) return;
  const char* kind = from.dim() == 0 ? "number" : is_pinned ? "pinned" : "pageable";
  count_wait(std::string("copy to the device (") + kind + ")");
  drain(stream);
}

void copy_to_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  c10::Stream stream = current_stream(from.device().index());
  const void* memory = to.storage().data();
  enqueue(stream, "copy to the host", Kind::kWork,
          [a = Alias(to), b = Alias(from)] { a.on_host().copy_(b.on_host()); });
  if (non_blocking && is_pinned(memory)) {
    keep_pinned_until(memory, record(stream));
    return;
  }
  count_wait("copy to the host");
  drain(stream);
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  TORCH_CHECK(!self.is_meta() && !source.is_meta(), "a copy from or to a meta tensor");
  if (self.is_same(source)) return self;
  Tensor from = source.expand(self.sizes());
  if (!self.numel()) return self;
  if (on_device(self) && on_device(from)) {
    copy_on_devices(self, from);
  } else if (on_device(self)) {
    copy_to_device(self, from, non_blocking);
  } else {
    copy_to_host(self, from, non_blocking);
  }
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  Tensor to = target;
  return copy(to, self, non_blocking);
}

at::Scalar item(const Tensor& self) {
  count_wait("item");
  drain(current_stream(self.device().index()));
  return Alias(self).on_host().item();
}

// Views -------------------------------------------------------------------------------------------

Tensor as_strided(const Tensor& self, IntArrayRef sizes, IntArrayRef strides,
                  optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

// Kernels that the CPU has not --------------------------------------------------------------------

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, optional<bool> train) {
  auto mask_options = input.options().dtype(at::kBool);
  if (train.has_value() && !*train) {
    return {input.clone(), at::empty_like(input, mask_options).fill_(true)};
  }
  Tensor mask = at::empty_like(input, mask_options).bernoulli_(1 - p);
  double scale = p == 1 ? 0.0 : 1 / (1 - p);
  return {input.mul(mask).mul(scale), mask};
}

// Cells of recurrent layers, of the products of their input and state with their weights.

bool is_there(const optional<Tensor>& tensor) { return tensor && tensor->defined(); }

Tensor with_biases(const Tensor& input, const Tensor& hidden, const optional<Tensor>& input_bias,
                   const optional<Tensor>& hidden_bias) {
  Tensor gates = input.add(hidden);
  return is_there(input_bias) ? gates.add(*input_bias).add(*hidden_bias) : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden,
                                             const Tensor& cell,
                                             const optional<Tensor>& input_bias,
                                             const optional<Tensor>& hidden_bias) {
  auto gates = with_biases(input, hidden, input_bias, hidden_bias).chunk(4, 1);
  Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), made = gates[2].tanh(),
         out = gates[3].sigmoid();
  Tensor next = forget.mul(cell).add(in.mul(made));
  return {out.mul(next.tanh()), next, at::cat({in, forget, made, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const optional<Tensor>& of_hidden,
                                                      const optional<Tensor>& of_next,
                                                      const Tensor& cell, const Tensor& next,
                                                      const Tensor& kept, bool has_bias) {
  if (!is_there(of_hidden) && !is_there(of_next)) return {};
  auto gates = kept.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &made = gates[2], &out = gates[3];
  Tensor bent = next.tanh();
  Tensor above = is_there(of_hidden) ? *of_hidden : at::zeros_like(next);
  Tensor of_cell = above.mul(out).mul(1 - bent.mul(bent));
  if (is_there(of_next)) of_cell = of_cell.add(*of_next);
  Tensor of_gates = at::cat({of_cell.mul(made).mul(in).mul(1 - in),
                             of_cell.mul(cell).mul(forget).mul(1 - forget),
                             of_cell.mul(in).mul(1 - made.mul(made)),
                             above.mul(bent).mul(out).mul(1 - out)},
                            1);
  return {of_gates, of_cell.mul(forget), has_bias ? of_gates.sum({0}) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& state,
                                    const optional<Tensor>& input_bias,
                                    const optional<Tensor>& hidden_bias) {
  auto of_input = (is_there(input_bias) ? input.add(*input_bias) : input).chunk(3, 1);
  auto of_state = (is_there(hidden_bias) ? hidden.add(*hidden_bias) : hidden).chunk(3, 1);
  Tensor reset = of_input[0].add(of_state[0]).sigmoid();
  Tensor keep = of_input[1].add(of_state[1]).sigmoid();
  Tensor made = of_input[2].add(reset.mul(of_state[2])).tanh();
  return {made.add(keep.mul(state.sub(made))),
          at::cat({reset, keep, made, state, of_state[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& above,
                                                                     const Tensor& kept,
                                                                     bool has_bias) {
  auto parts = kept.chunk(5, 1);
  const Tensor &reset = parts[0], &keep = parts[1], &made = parts[2], &state = parts[3];
  Tensor of_keep = above.mul(state.sub(made)).mul(1 - keep).mul(keep);
  Tensor of_made = above.mul(1 - keep).mul(1 - made.mul(made));
  Tensor of_reset = of_made.mul(parts[4]).mul(1 - reset).mul(reset);
  Tensor of_input = at::cat({of_reset, of_keep, of_made}, 1);
  Tensor of_hidden = at::cat({of_reset, of_keep, of_made.mul(reset)}, 1);
  Tensor none;
  return {of_input, of_hidden, above.mul(keep), has_bias ? of_input.sum({0}) : none,
          has_bias ? of_hidden.sum({0}) : none};
}

// Which attention is computed: 0 is the one of matrix products; the fused ones are a GPU's.
int64_t attention_choice(const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&,
                         double, bool, optional<double>, bool) {
  return 0;
}

}  // namespace

}  // namespace standin

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &standin::empty);
  library.impl("empty_strided", &standin::empty_strided);
  library.impl("resize_", &standin::resize);
  library.impl("set_.source_Storage", &standin::set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &standin::set_storage);
  library.impl("set_.source_Tensor", &standin::set_tensor);
  library.impl("record_stream", &standin::record_stream);

  library.impl("copy_", &standin::copy);
  library.impl("_copy_from", &standin::copy_from);
  library.impl("_local_scalar_dense", &standin::item);

  library.impl("as_strided", &standin::as_strided);
  library.impl("view", [](const at::Tensor& self, c10::IntArrayRef sizes) {
    return at::native::view(self, sizes);
  });
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);

  library.impl("native_dropout", &standin::native_dropout);
  library.impl("_thnn_fused_lstm_cell", &standin::lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &standin::lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", &standin::gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", &standin::gru_cell_backward);
  library.impl("_fused_sdp_choice", &standin::attention_choice);
}
