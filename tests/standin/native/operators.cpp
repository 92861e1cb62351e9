// Operators: the kernels of the CPU, run by the thread of a stream.
//
// A boxed fallback serves all operators that kernels.cpp has not. It infers the shapes of results
// on the meta device, so that the host goes on at once, and queues the work with the memory of the
// arguments. Where shapes cannot be inferred, the host waits: as on a GPU where they depend on
// data, and else as a defect of the stand-in, which is counted apart.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "generators.h"
#include "streams.h"
#include "tensors.h"
#include "waits.h"

namespace standin {

namespace {

using at::IValue;
using at::Tensor;
using Stack = c10::Stack;

template <class F>
IValue map_tensors(const IValue& value, F f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    std::vector<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector()) mapped.push_back(f(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
      mapped.push_back(tensor ? std::optional<Tensor>(f(*tensor)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

template <class F>
void for_each_tensor(const IValue& value, F f) {
  map_tensors(value, [&](const Tensor& tensor) {
    if (tensor.defined()) f(tensor);
    return tensor;
  });
}

template <class F>
bool any_tensor(const Stack& values, F f) {
  bool any = false;
  for (const IValue& value : values) {
    for_each_tensor(value, [&](const Tensor& tensor) { any = any || f(tensor); });
  }
  return any;
}

bool names_device(const IValue& value) {
  return value.isDevice() && value.toDevice().type() == c10::kCUDA;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_output(const c10::Argument& argument) {
  return argument.kwarg_only() && is_written(argument);
}

// What a schema says of an operator.
struct Signature {
  explicit Signature(const c10::FunctionSchema& schema)
      : name(schema.operator_name().name), arguments(schema.arguments()) {
    if (!schema.overload_name().empty()) name += "." + schema.overload_name();
    for (const c10::Argument& argument : arguments) has_outputs |= is_output(argument);
    for (const c10::Argument& result : schema.returns()) {
      only_tensors &= result.type()->str().find("Tensor") != std::string::npos;
      is_view |= result.alias_info() != nullptr && !result.alias_info()->isWrite();
      results.push_back(written_argument(result));
      has_fresh |= !results.back();
    }
  }

  std::string name;
  const std::vector<c10::Argument>& arguments;
  std::vector<std::optional<size_t>> results;  // the argument that comes back, or a new value
  bool only_tensors = true, is_view = false, has_outputs = false, has_fresh = false;

 private:
  std::optional<size_t> written_argument(const c10::Argument& result) const {
    if (result.alias_info() == nullptr) return std::nullopt;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (is_written(arguments[i]) && *arguments[i].alias_info() == *result.alias_info()) return i;
    }
    return std::nullopt;
  }
};

// Takes indices or lengths of the host beside tensors of the device.
bool takes_host_tensors(const std::string& name) {
  static const std::set<std::string> names{"aten::index.Tensor",
                                           "aten::index.Tensor_out",
                                           "aten::index_put",
                                           "aten::index_put_",
                                           "aten::_index_put_impl_",
                                           "aten::_unsafe_index.Tensor",
                                           "aten::_pack_padded_sequence",
                                           "aten::_pad_packed_sequence",
                                           "aten::_amp_foreach_non_finite_check_and_unscale_"};
  return names.count(name) > 0;
}

// The size of the result depends on data, or the result is the host's: a GPU is waited for, too.
bool waits_on_gpu(const Signature& signature, const Stack& arguments) {
  static const std::set<std::string> names{
      "aten::nonzero",    "aten::masked_select",           "aten::_unique",  "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive",      "aten::bincount", "aten::equal",
      "aten::is_nonzero", "aten::repeat_interleave.Tensor"};
  if (names.count(signature.name) > 0) return true;
  bool takes_indices = signature.name.rfind("aten::index.", 0) == 0 ||
                       signature.name.rfind("aten::index_put", 0) == 0 ||
                       signature.name.rfind("aten::_index_put", 0) == 0;
  return takes_indices && any_tensor({arguments.at(1)}, [](const Tensor& index) {
           return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
         });
}

// The CPU's kernel gives results of other shapes than a GPU's, which the meta device tells.
bool has_own_shapes(const std::string& name) {
  return name == "aten::_embedding_bag" || name == "aten::_embedding_bag_forward_only";
}

// The device of a call. Raises CUDA's errors for tensors that lie at different places.
c10::DeviceIndex device_of_call(const Signature& signature, const Stack& arguments) {
  std::optional<c10::Device> found;
  bool has_host = false;
  for (const IValue& value : arguments) {
    for_each_tensor(value, [&](const Tensor& tensor) {
      TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, signature.name,
                                  " of a sparse tensor beside a dense one");
      TORCH_CHECK(!tensor.is_meta(), signature.name, " of a meta tensor and one of the device");
      if (on_device(tensor)) {
        TORCH_CHECK(
            !found || *found == tensor.device(),
            "Expected all tensors to be on the same device, but found at least two devices, ",
            *found, " and ", tensor.device(), "! (", signature.name, ")");
        found = tensor.device();
      } else if (tensor.dim() > 0) {
        has_host = true;
      }
    });
    if (names_device(value) && !found) found = device_of(value.toDevice().index());
  }
  if (has_host && found) {
    TORCH_CHECK(takes_host_tensors(signature.name),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *found, " and cpu! (", signature.name, ")");
    count_wait("index on the host", signature.name);
  }
  return found ? found->index() : current_device();
}

Tensor on_meta(const Tensor& tensor) {
  bool is_number = tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number();
  if (!tensor.defined() || is_number) return tensor;  // Python's numbers may lie beside any device
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kMeta);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

// The statistics of a normalization have the dtype of the CPU's kernels, which its backward
// expects: the input's, or float beside parameters of another dtype. The meta device tells a GPU's.
void fit_statistics(const Signature& signature, const Stack& arguments, Stack& shapes) {
  static const std::set<std::string> names{
      "aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm",
      "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit.no_stats"};
  if (names.count(signature.name) == 0) return;
  const at::ScalarType dtype = arguments.at(0).toTensor().scalar_type();
  const bool is_mixed =
      any_tensor(arguments, [dtype](const Tensor& t) { return t.scalar_type() != dtype; });
  for (size_t r = 1; r < shapes.size(); ++r) {
    shapes[r] = shapes[r].toTensor().to(is_mixed ? at::kFloat : dtype);
  }
}

// Runs the operator on the meta device: its results, if they can be had without data. Gives tensors
// that are passed for output their shapes.
std::optional<Stack> infer(const c10::OperatorHandle& op, const Signature& signature,
                           const Stack& arguments) {
  Stack shapes;
  for (size_t i = 0; i < arguments.size(); ++i) {
    IValue value = map_tensors(arguments[i], on_meta);
    if (names_device(value)) value = c10::Device(at::kMeta);
    if (value.isGenerator()) value = IValue();
    shapes.push_back(value);
  }
  const Stack given = shapes;
  try {
    at::AutoDispatchBelowAutograd no_autograd;
    op.callBoxed(&shapes);
  } catch (const std::exception& error) {
    if (environment_number("LIGHTNING_GPP_STANDIN_VERBOSE", 0)) {
      std::fprintf(stderr, "stand-in for GPUs: no shapes of %s: %.300s\n", signature.name.c_str(),
                   error.what());
    }
    return std::nullopt;
  }
  fit_statistics(signature, arguments, shapes);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!is_output(signature.arguments[i])) continue;
    std::vector<Tensor> outputs;
    for_each_tensor(arguments[i], [&](const Tensor& tensor) { outputs.push_back(tensor); });
    size_t k = 0;
    for_each_tensor(given[i], [&](const Tensor& shape) {
      const Tensor& output = outputs.at(k++);
      if (output.sizes() != shape.sizes()) output.resize_(shape.sizes());
    });
  }
  return shapes;
}

// An argument, kept for a stream: tensors of the device by their memory, others by value.
class Kept {
 public:
  Kept(const IValue& value, bool is_output) : is_output_(is_output && value.isTensor()) {
    value_ = map_tensors(value, [&](const Tensor& tensor) {
      if (on_device(tensor)) {
        aliases_.emplace_back(Alias(tensor));
        return Tensor();
      }
      aliases_.emplace_back(std::nullopt);
      return tensor.defined() ? copy_of_host(tensor) : tensor;
    });
    if (names_device(value_)) value_ = c10::Device(at::kCPU);
  }

  IValue on_host() const {
    // Operators of the CPU may resize what they are given for output, which no alias can be.
    if (is_output_) return at::empty({0}, at::TensorOptions().dtype(aliases_.at(0)->dtype()));
    size_t k = 0;
    return map_tensors(value_, [&](const Tensor& tensor) {
      const std::optional<Alias>& alias = aliases_.at(k++);
      return alias ? alias->on_host() : tensor;
    });
  }

  void take_output(const IValue& value) const {
    if (is_output_ && value.toTensor().numel()) aliases_.at(0)->on_host().copy_(value.toTensor());
  }

 private:
  static Tensor copy_of_host(const Tensor& tensor) {  // the host may change its own meanwhile
    Tensor copy = tensor.clone();
    bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    if (is_number) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }

  bool is_output_;
  IValue value_;
  std::vector<std::optional<Alias>> aliases_;
};

std::vector<Kept> keep(const Signature& signature, const Stack& arguments) {
  std::vector<Kept> kept;
  for (size_t i = 0; i < arguments.size(); ++i) {
    kept.emplace_back(arguments[i], is_output(signature.arguments[i]));
  }
  return kept;
}

Stack run_on_host(const c10::OperatorHandle& op, const std::vector<Kept>& arguments) {
  Stack stack;
  for (const Kept& argument : arguments) stack.push_back(argument.on_host());
  const Stack given = stack;
  op.callBoxed(&stack);
  for (size_t i = 0; i < given.size(); ++i) arguments[i].take_output(given[i]);
  return stack;
}

Tensor empty_like_on(const Tensor& shape, c10::DeviceIndex device) {
  auto options = at::TensorOptions().dtype(shape.scalar_type());
  return at::empty_strided(shape.sizes(), shape.strides(),
                           options.device(c10::Device(c10::kCUDA, device)));
}

// Makes a value's tensors on the device; `keep` is called with each pair.
template <class F>
IValue made_on(c10::DeviceIndex device, const IValue& value, F keep) {
  return map_tensors(value, [&](const Tensor& shape) {
    Tensor made = shape.defined() ? empty_like_on(shape, device) : Tensor();
    keep(shape, made);
    return made;
  });
}

// Queues the work and returns at once with tensors of inferred shapes.
Stack start(const c10::OperatorHandle& op, const Signature& signature, const Stack& arguments,
            const Stack& shapes, c10::DeviceIndex device) {
  Stack results;
  std::vector<std::optional<Alias>> fresh;
  for (size_t r = 0; r < signature.results.size(); ++r) {
    if (signature.results[r]) {
      results.push_back(arguments[*signature.results[r]]);
      continue;
    }
    results.push_back(made_on(device, shapes.at(r), [&](const Tensor&, const Tensor& made) {
      fresh.push_back(made.defined() ? std::optional<Alias>(made) : std::nullopt);
    }));
  }
  std::vector<Kept> kept = keep(signature, arguments);
  auto work = [op, kept = std::move(kept), fresh = std::move(fresh),
               comes_back = signature.results] {
    Stack found = run_on_host(op, kept);
    size_t k = 0;
    for (size_t r = 0; r < found.size(); ++r) {
      if (comes_back[r]) continue;
      map_tensors(found[r], [&](const Tensor& tensor) {
        const std::optional<Alias>& place = fresh.at(k++);
        if (place && tensor.defined() && tensor.numel()) place->on_host().copy_(tensor);
        return tensor;
      });
    }
  };
  enqueue(current_stream(device), signature.name.c_str(), Kind::kWork, std::move(work));
  return results;
}

// Waits for the work; its errors are the caller's.
Stack run(const c10::OperatorHandle& op, const Signature& signature, const Stack& arguments,
          c10::DeviceIndex device) {
  std::vector<Kept> kept = keep(signature, arguments);
  c10::Stream stream = current_stream(device);
  Stack found;
  std::exception_ptr error;
  auto done = std::make_shared<Signal>();
  enqueue(stream, signature.name.c_str(), Kind::kWork, [&, done] {
    try {
      found = run_on_host(op, kept);
    } catch (...) {
      error = std::current_exception();
    }
    done->set();
  });
  done->wait();
  if (error) std::rethrow_exception(error);
  Stack results;
  for (size_t r = 0; r < found.size(); ++r) {
    if (signature.results[r]) {
      results.push_back(arguments[*signature.results[r]]);
      continue;
    }
    results.push_back(made_on(device, found[r], [&](const Tensor& tensor, const Tensor& made) {
      if (!made.defined() || !made.numel()) return;
      enqueue(stream, "result", Kind::kBookkeeping,
              [tensor, place = Alias(made)] { place.on_host().copy_(tensor); });
    }));
  }
  return results;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const Signature signature(op.schema());
  TORCH_CHECK(!signature.is_view, "the stand-in for GPUs lacks the view ", signature.name);
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
                              "the stand-in for GPUs lacks a kernel of ", signature.name);
  const size_t num_arguments = signature.arguments.size();
  Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(num_arguments), stack->end());
  const c10::DeviceIndex device = device_of_call(signature, arguments);
  c10::DeviceGuard guard(c10::Device(c10::kCUDA, device));
  for (size_t i = 0; i < num_arguments; ++i) {
    if (signature.arguments[i].name() != "generator") continue;
    arguments[i] = seeded_by(arguments[i].isNone() ? generator_of(device)
                                                   : arguments[i].toGenerator());
  }

  const bool depends_on_data = waits_on_gpu(signature, arguments);
  std::optional<Stack> shapes;
  if (signature.only_tensors && !depends_on_data && !has_own_shapes(signature.name)) {
    bool needs_shapes = signature.has_fresh || signature.has_outputs;
    shapes = needs_shapes ? infer(op, signature, arguments) : Stack();
  }
  if (!shapes)
    count_wait(depends_on_data ? "shape or value of data" : "(stand-in)", signature.name);
  Stack results = shapes ? start(op, signature, arguments, *shapes, device)
                         : run(op, signature, arguments, device);
  stack->erase(stack->end() - static_cast<std::ptrdiff_t>(num_arguments), stack->end());
  for (IValue& result : results) stack->push_back(std::move(result));
}

}  // namespace

}  // namespace standin

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&standin::fallback>());
}
