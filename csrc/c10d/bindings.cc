// The Python module paceline._c10d.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/backend.h"
#include "c10d/rendezvous.h"
#include "common/log.h"
#include "reduce/reduce.h"

namespace py = pybind11;

namespace paceline {
namespace {

// Columns: step, peer, chunk, count, whether this rank receives, whether it reduces, the number of its first spread.
// Spreads: number, source, receivers.
std::shared_ptr<Program> make_program(
    uint32_t rank, uint32_t num_ranks, uint32_t num_chunks, uint64_t digest, const std::string& name,
    const py::array_t<int64_t, py::array::c_style | py::array::forcecast>& table, bool in_order, bool in_turn,
    const std::vector<std::tuple<uint32_t, uint32_t, std::vector<uint32_t>>>& spreads) {
  if (table.ndim() != 2 || table.shape(1) != 7) throw py::value_error("rows have seven columns");
  const auto cells = table.unchecked<2>();
  std::vector<Row> rows;
  rows.reserve(static_cast<size_t>(table.shape(0)));
  for (py::ssize_t i = 0; i < table.shape(0); ++i) {
    rows.push_back({static_cast<uint32_t>(cells(i, 0)), static_cast<uint32_t>(cells(i, 1)),
                    static_cast<uint32_t>(cells(i, 2)), static_cast<uint32_t>(cells(i, 3)), cells(i, 4) != 0,
                    cells(i, 5) != 0, cells(i, 6)});
  }
  std::vector<SpreadRow> described;
  described.reserve(spreads.size());
  for (const auto& [number, source, receivers] : spreads) described.push_back({number, source, receivers});
  return std::make_shared<Program>(rank, num_ranks, num_chunks, digest, name, rows, in_order, in_turn, described);
}

// Holds a Python object that C++ threads may drop: only with the interpreter's lock, and not when it is gone.
std::shared_ptr<py::object> hold(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            if (Py_IsInitialized() == 0) return;
            const py::gil_scoped_acquire lock;
            delete held;
          }};
}

// Turn, collective, bytes, choice, and for each rank the seconds since the first arrived.
py::tuple describe(const Decisions::Record& record) {
  const Clock::time_point first = *std::min_element(record.arrivals.begin(), record.arrivals.end());
  py::list late_s;
  for (const Clock::time_point arrival : record.arrivals) {
    late_s.append(std::chrono::duration<double>(arrival - first).count());
  }
  return py::make_tuple(record.turn, record.seq, record.bytes(), record.choice, py::tuple(late_s));
}

py::list describe_all(const std::vector<Decisions::Record>& records) {
  py::list list;
  for (const Decisions::Record& record : records) list.append(describe(record));
  return list;
}

// Of a Python planner (paceline.planner): its calls, and its `rules`, which may be None.
Plans wrap_planner(const std::shared_ptr<py::object>& planner) {
  Plans plans;
  plans.planner = [planner](const PlanRequest& request) {
    const py::gil_scoped_acquire lock;
    return (*planner)(name(request.kind), request.root, request.bytes, request.exact, request.choice, request.members)
        .cast<std::shared_ptr<Program>>();
  };
  const py::object rules = planner->attr("rules");
  if (rules.is_none()) return plans;
  plans.least_awaiting_bytes = rules.attr("least_bytes").cast<uint64_t>();
  plans.rules.enabled = true;
  plans.rules.patience_s_per_byte = rules.attr("patience_s_per_byte").cast<double>();
  plans.rules.least_patience = std::chrono::duration<double>(rules.attr("least_patience_s").cast<double>());
  plans.rules.most_missing = rules.attr("most_late").cast<uint32_t>();
  plans.rules.window = rules.attr("window").cast<uint64_t>();
  plans.rules.forecast = [planner](const std::vector<Decisions::Record>& records) {
    const py::gil_scoped_acquire lock;
    return planner->attr("forecast")(describe_all(records)).cast<std::string>();
  };
  return plans;
}

c10::intrusive_ptr<Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                         std::chrono::milliseconds timeout, const std::shared_ptr<Engine>& engine,
                                         const std::string& host, py::object known_links, py::object make_planner) {
  Backend::Settings settings;
  settings.engine = engine;
  settings.timeout = timeout;
  settings.host = host;
  settings.known_links = [known = hold(std::move(known_links))] {
    const py::gil_scoped_acquire lock;
    return (*known)().cast<std::string>();
  };
  settings.make_planner = [maker = hold(std::move(make_planner))](
                              int group_rank, const c10::intrusive_ptr<c10d::Store>& group_store,
                              const std::vector<std::string>& hosts, const std::string& links, const Exchange& exchange,
                              const TryMulticast& try_multicast) {
    const py::gil_scoped_acquire lock;
    const py::cpp_function unlocked(exchange, py::call_guard<py::gil_scoped_release>());
    const py::cpp_function try_it(
        [try_multicast](const std::string& address, uint16_t first_port, uint16_t last_port, uint64_t up_bytes_per_s,
                        uint64_t down_bytes_per_s) {
          return try_multicast({address, first_port, last_port, {up_bytes_per_s, down_bytes_per_s}});
        },
        py::call_guard<py::gil_scoped_release>());
    return wrap_planner(hold((*maker)(group_rank, group_store, hosts, links, unlocked, try_it)));
  };
  const py::gil_scoped_release unlocked;
  return c10::make_intrusive<Backend>(store, rank, size, std::move(settings));
}

c10::intrusive_ptr<Backend> open_backend(const py::bytes& shared, int worker, int capacity,
                                         std::chrono::milliseconds timeout, const std::shared_ptr<Engine>& engine,
                                         const std::string& host, py::object planner) {
  Backend::Settings settings;
  settings.engine = engine;
  settings.timeout = timeout;
  settings.host = host;
  Plans plans = wrap_planner(hold(std::move(planner)));
  const std::string bytes = shared;
  const py::gil_scoped_release unlocked;
  return c10::make_intrusive<Backend>(bytes, worker, capacity, std::move(settings), std::move(plans.planner));
}

}  // namespace

PYBIND11_MODULE(_c10d, module) {
  module.doc() = "The engine and the c10d backend, in C++.";
  py::module_::import("torch.distributed");

  py::class_<Program, std::shared_ptr<Program>>(module, "Program")
      .def(py::init(&make_program), py::arg("rank"), py::arg("num_ranks"), py::arg("num_chunks"), py::arg("digest"),
           py::arg("name"), py::arg("rows"), py::arg("in_order") = false, py::arg("in_turn") = false,
           py::arg("spreads") = std::vector<std::tuple<uint32_t, uint32_t, std::vector<uint32_t>>>())
      .def_property_readonly("name", &Program::name);

  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def(py::init([](const std::string& interface, bool use_shm, bool huge_pages, int64_t host_timeout_s,
                       const std::string& congestion, const std::string& master) {
             EngineOptions options{interface, use_shm};
             options.move_to_huge_pages = huge_pages;
             options.host_timeout = std::chrono::seconds(host_timeout_s);
             options.congestion = congestion;
             options.master = master;
             return std::shared_ptr<Engine>(new Engine(options), &Engine::end);
           }),
           py::arg("interface"), py::arg("use_shm"), py::arg("huge_pages"), py::arg("host_timeout_s"),
           py::arg("congestion"), py::arg("master"))
      .def_property_readonly("tcp_address", [](const Engine& engine) { return engine.address().tcp; })
      .def(
          "address",
          [](const Engine& engine, const std::string& host) {
            PeerAddress address = engine.address();
            address.host = host;
            return to_text(address);
          },
          py::arg("host"), "Where other processes reach this one, as text.");

  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(module, "Backend")
      .def(py::init(&make_backend), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
           py::arg("engine"), py::arg("host"), py::arg("known_links"), py::arg("make_planner"))
      .def(
          "arrivals",
          [](Backend& backend) {
            std::vector<Decisions::Record> records;
            {
              const py::gil_scoped_release unlocked;
              records = backend.arrivals();
            }
            return describe_all(records);
          },
          "Who arrived when at each collective that awaited a decision.")
      .def(
          "partial_allreduce",
          [](Backend& backend, at::Tensor tensor, std::vector<int64_t> members, uint64_t number,
             const c10d::ReduceOp& op, std::chrono::milliseconds timeout, bool asynchronous) {
            return backend.partial_allreduce(tensor, std::move(members), number, op, timeout, asynchronous);
          },
          py::arg("tensor"), py::arg("members"), py::arg("number"), py::arg("op"), py::arg("timeout"),
          py::arg("asynchronous"), py::call_guard<py::gil_scoped_release>(),
          "Reduces among some ranks; None when it has ended.")
      .def_static("open", &open_backend, py::arg("shared"), py::arg("worker"), py::arg("capacity"), py::arg("timeout"),
                  py::arg("engine"), py::arg("host"), py::arg("planner"),
                  "One of the workers that come and go; only partial operations run.")
      .def("introduce", &Backend::introduce, py::arg("peer"), py::arg("address"),
           py::call_guard<py::gil_scoped_release>(), "Says where a worker is.")
      .def("leave", &Backend::shutdown, py::call_guard<py::gil_scoped_release>(), "Parts from the others.")
      .def("give_up", &Backend::give_up, py::arg("number"), py::arg("reason"), py::call_guard<py::gil_scoped_release>(),
           "Ends a partial operation on all its members.")
      .def("failure", &Backend::failure, py::call_guard<py::gil_scoped_release>(),
           "Why the group has failed, or an empty string.")
      .def(
          "multicast_counters",
          [](Backend& backend) -> std::optional<std::map<std::string, uint64_t>> {
            const auto counters = backend.packet_counters();
            if (!counters) return std::nullopt;
            const Multicast::Counters& packets = counters->packets;
            return std::map<std::string, uint64_t>{{"packets_sent", packets.packets_sent},
                                                   {"bytes_sent", packets.bytes_sent},
                                                   {"packets_refused", packets.packets_refused},
                                                   {"packets_received", packets.packets_received},
                                                   {"bytes_received", packets.bytes_received},
                                                   {"malformed", packets.malformed},
                                                   {"forged", packets.forged},
                                                   {"stale", packets.stale},
                                                   {"mismatched", packets.mismatched},
                                                   {"duplicate", packets.duplicate},
                                                   {"overflowed", packets.overflowed},
                                                   {"batches_received", packets.batches_received},
                                                   {"batches_sent", packets.batches_sent},
                                                   {"rounds_again", counters->spreads.rounds},
                                                   {"repaired_bytes", counters->spreads.repaired_bytes}};
          },
          py::call_guard<py::gil_scoped_release>(), "What went by multicast; None where the group has none.")
      .def("chosen", &Backend::chosen, py::call_guard<py::gil_scoped_release>(),
           "Which algorithm runs each kind of collective used so far.");

  module.def("set_log_level", [](int level) { set_log_level(static_cast<LogLevel>(level)); });
  module.def("instruction_set", &instruction_set);
}

}  // namespace paceline
