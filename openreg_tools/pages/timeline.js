// The timeline of `trace`: the slices of #timeline-data on a canvas that zooms and pans. Times are nanoseconds; with
// idle time cut, `at` maps them to places that skip it.
"use strict";

(() => {
  const box = document.getElementById("timeline");
  const source = document.getElementById("timeline-data");
  if (!box || !source) return;
  const { length, kinds, tracks, stacks, texts, slices, arrows, cuts, cut } = JSON.parse(source.textContent);
  const count = slices.start.length;
  const LANE = 17, HEAD = 19, AXIS = 22, GAP = 5; // pixels

  // ---- elements ----

  const make = (tag, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  };
  const button = (words, title, onclick) => make("button", { type: "button", textContent: words, title, onclick });
  const range = make("span", { className: "range" });
  const cutIdle = make("input", { type: "checkbox", checked: true });
  const find = make("input", { type: "search", placeholder: "find an operator" });
  find.setAttribute("aria-label", "find an operator");
  const overview = make("canvas", { className: "overview" });
  const canvas = make("canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `timeline of ${count} slices; the tables below have their times`);
  const sizer = make("div"), rows = make("div", { className: "rows" }, canvas, sizer);
  const detail = make("div", { className: "call", hidden: true });
  const help = "Zoom: buttons, Ctrl and wheel, pinch, + and \u2212, or drag across the overview. Pan: drag, arrow keys. Click or tap a call to keep it.";
  box.append(
    make(
      "div",
      { className: "bar" },
      button("+", "zoom in", () => zoom(0.5)),
      button("\u2212", "zoom out", () => zoom(2)),
      button("all", "show everything", () => show(0, total)),
      make("label", {}, cutIdle, "cut idle time"),
      find,
      range,
    ),
    overview,
    rows,
    detail,
    make("p", { className: "help", textContent: help }),
  );

  // ---- colors ----

  const probe = box.appendChild(make("span", { hidden: true }));
  let color = {};
  function readColors() {
    for (const name of [...kinds, "ink", "dim", "line", "card", "paper", "accent"]) {
      probe.style.color = `var(--${name})`;
      color[name] = getComputedStyle(probe).color;
    }
  }

  // ---- time and place ----

  const wide = Float64Array.from(cuts, ([a, b]) => b - a - cut); // what each cut removes
  const removed = new Float64Array(cuts.length + 1);
  wide.forEach((each, i) => (removed[i + 1] = removed[i] + each));

  // The number of elements of a sorted sequence below which `is` holds.
  function bisect(size, is) {
    let low = 0, high = size;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (is(middle)) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  function at(time) {
    if (!cutIdle.checked) return time;
    const i = bisect(cuts.length, (k) => cuts[k][0] <= time) - 1; // the last cut that begins before
    if (i < 0) return time;
    const [a, b] = cuts[i];
    return time >= b ? time - removed[i + 1] : a - removed[i] + ((time - a) / (b - a)) * cut;
  }

  function timeOf(place) {
    if (!cutIdle.checked) return place;
    const i = bisect(cuts.length, (k) => cuts[k][0] - removed[k] <= place) - 1;
    if (i < 0) return place;
    const [a, b] = cuts[i], start = a - removed[i];
    return place >= start + cut ? place + removed[i + 1] : a + ((place - start) / cut) * (b - a);
  }

  const from = new Float64Array(count), to = new Float64Array(count); // places of the slices
  let total = 1, view = { from: 0, to: 1 };
  function place() {
    for (let i = 0; i < count; i++) {
      from[i] = at(slices.start[i]);
      to[i] = at(slices.start[i] + slices.length[i]);
    }
    total = Math.max(at(length), ...tracks.map((track) => track.lanes.at(-1)?.reduce((most, i) => Math.max(most, to[i]), 0) ?? 0), 1);
  }

  // ---- layout: lanes of each track, whose slices do not overlap ----

  let height = AXIS;
  tracks.forEach((track) => (track.lanes = []));
  for (let i = 0; i < count; i++) {
    const lanes = tracks[slices.track[i]].lanes;
    while (lanes.length <= slices.depth[i]) lanes.push([]);
    lanes[slices.depth[i]].push(i);
  }
  for (const track of tracks) {
    track.top = height;
    if (track.lanes.length) height += HEAD + track.lanes.length * LANE + GAP;
  }
  sizer.style.height = "0px";

  const middle = (i) => tracks[slices.track[i]].top + HEAD + slices.depth[i] * LANE + LANE / 2;
  const format = (ns) => {
    const [unit, scale] = ns < 1e3 ? ["ns", 1] : ns < 1e6 ? ["us", 1e3] : ns < 1e9 ? ["ms", 1e6] : ["s", 1e9];
    return `${Number((ns / scale).toPrecision(4))} ${unit}`;
  };

  // ---- drawing ----

  let wanted = false, pointed = -1, kept = -1, matches = null;
  const draw = () => {
    if (!wanted) requestAnimationFrame(paint);
    wanted = true;
  };

  function prepare(target, high) {
    const ratio = devicePixelRatio || 1, width = target.parentNode.clientWidth;
    const w = Math.round(width * ratio), h = Math.round(high * ratio);
    if (target.width !== w || target.height !== h) Object.assign(target, { width: w, height: h });
    target.style.height = `${high}px`;
    const pen = target.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, high);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return [pen, width];
  }

  function paint() {
    wanted = false;
    const visible = Math.min(height, Math.max(160, Math.round(innerHeight * 0.7) - 4));
    const [pen, width] = prepare(canvas, visible);
    sizer.style.height = `${Math.max(0, height - visible)}px`;
    const scale = width / (view.to - view.from), top = rows.scrollTop;
    const x = (where) => (where - view.from) * scale;
    paintCuts(pen, x, width, visible);
    for (const track of tracks) {
      if (!track.lanes.length) continue;
      const y = track.top - top;
      pen.fillStyle = color.line;
      pen.fillRect(0, y, width, 1);
      track.lanes.forEach((lane, depth) => {
        const start = y + HEAD + depth * LANE;
        if (start > -LANE && start < visible) paintLane(pen, lane, start, x, scale);
      });
      pen.fillStyle = color.dim;
      pen.fillText(track.name, 6, y + HEAD / 2 + 1);
    }
    paintArrows(pen, x, top);
    paintAxis(pen, width);
    paintOverview();
    const shown = timeOf(view.to) - timeOf(view.from);
    range.textContent = `${format(shown)} of ${format(length)}`;
  }

  function paintCuts(pen, x, width, visible) {
    if (!cutIdle.checked) return;
    const first = bisect(cuts.length, (k) => at(cuts[k][1]) < view.from);
    for (let k = first; k < cuts.length; k++) {
      const a = x(cuts[k][0] - removed[k]), b = a + (cut * width) / (view.to - view.from);
      if (a > width) break;
      if (b - a < 1.5) continue;
      pen.fillStyle = color.paper;
      pen.fillRect(a, AXIS, b - a, visible);
      if (b - a < 9) continue;
      pen.strokeStyle = color.line;
      pen.setLineDash([3, 4]);
      pen.beginPath();
      pen.moveTo((a + b) / 2, AXIS);
      pen.lineTo((a + b) / 2, visible);
      pen.stroke();
      pen.setLineDash([]);
      const words = `${format(cuts[k][1] - cuts[k][0])} idle`;
      if (b - a > 14) {
        pen.save();
        pen.translate((a + b) / 2, AXIS + 8);
        pen.rotate(Math.PI / 2);
        pen.fillStyle = color.dim;
        pen.fillText(words, 0, 0);
        pen.restore();
      }
    }
  }

  function paintLane(pen, lane, y, x, scale) {
    let until = -1, last = -1;
    for (let k = bisect(lane.length, (j) => to[lane[j]] < view.from); k < lane.length; k++) {
      const i = lane[k];
      if (from[i] > view.to) break;
      const a = Math.max(-2, x(from[i])), b = Math.min(x(to[i]), 1e4), w = Math.max(b - a - (b - a > 4 ? 1 : 0), 0.7);
      const waits = slices.flags[i] & 1, kind = waits ? -1 : slices.kind[i];
      if (w < 1 && a + w <= until && kind === last) continue; // already a pixel of this color
      pen.globalAlpha = matches && !matches.has(slices.name[i]) ? 0.2 : 1;
      pen.fillStyle = color[kinds[slices.kind[i]]];
      pen.fillRect(a, y, w, LANE - 2);
      if (waits) {
        pen.fillStyle = color.wait;
        pen.fillRect(a, y, Math.max(w, 2), 4);
      }
      if (w > 24) {
        const room = Math.floor((w - 8) / 6);
        const words = texts[slices.name[i]].replace(/^aten::/, "");
        pen.fillStyle = color.ink;
        pen.fillText(words.length > room ? words.slice(0, Math.max(1, room - 1)) + "\u2026" : words, Math.max(a, 0) + 4, y + LANE / 2 + 1);
      }
      if (i === pointed || i === kept) {
        pen.strokeStyle = color.ink;
        pen.lineWidth = 1.5;
        pen.strokeRect(a - 0.5, y - 0.5, w + 1, LANE - 1);
        pen.lineWidth = 1;
      }
      until = a + w + 0.3;
      last = kind;
    }
    pen.globalAlpha = 1;
  }

  function paintArrows(pen, x, top) {
    const near = arrows.filter(([a, b]) => to[a] <= view.to && from[b] >= view.from);
    const chosen = arrows.filter(([a, b]) => [a, b].some((i) => i === pointed || i === kept));
    for (const [a, b] of near.length <= 24 ? [...near, ...chosen] : chosen) {
      const x1 = x(to[a]), x2 = x(slices.flags[b] & 1 && from[b] < to[a] ? to[b] : from[b]);
      const y1 = middle(a) - top, y2 = middle(b) - top, bend = Math.max(12, Math.abs(x2 - x1) / 2);
      pen.strokeStyle = pen.fillStyle = color.wait;
      pen.beginPath();
      pen.moveTo(x1, y1);
      pen.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
      pen.stroke();
      pen.beginPath();
      pen.moveTo(x2, y2);
      pen.lineTo(x2 - 6, y2 - 3);
      pen.lineTo(x2 - 6, y2 + 3);
      pen.fill();
    }
  }

  function paintAxis(pen, width) {
    pen.fillStyle = color.card;
    pen.fillRect(0, 0, width, AXIS);
    pen.fillStyle = color.line;
    pen.fillRect(0, AXIS - 1, width, 1);
    pen.fillStyle = color.dim;
    const steps = Math.max(1, Math.floor(width / 110)), span = timeOf(view.to) - timeOf(view.from);
    const [unit, scale] = span < 2e6 ? ["us", 1e3] : span < 2e9 ? ["ms", 1e6] : ["s", 1e9];
    const times = Array.from({ length: steps }, (_, k) => timeOf(view.from + ((view.to - view.from) * k) / steps));
    const apart = Math.max(1, Math.min(span, ...times.slice(1).map((time, k) => time - times[k]))); // so that labels differ
    const digits = Math.min(4, Math.max(0, Math.ceil(-Math.log10(apart / scale))));
    times.forEach((time, k) => {
      pen.fillRect((width * k) / steps, AXIS - 6, 1, 6);
      pen.fillText(`${(time / scale).toFixed(digits)} ${unit}`, (width * k) / steps + 5, AXIS / 2);
    });
  }

  // The overview is painted once for each width, mode and theme, on a canvas of its own.
  let backdrop = null;
  function paintBackdrop(width) {
    const picture = make("canvas", { width: overview.width, height: overview.height }), pen = picture.getContext("2d");
    pen.scale(overview.width / width, overview.width / width);
    pen.fillStyle = color.card;
    pen.fillRect(0, 0, width, 34);
    const used = tracks.filter((track) => track.lanes.length), high = 34 / Math.max(1, used.length);
    used.forEach((track, row) => {
      let until = -1;
      for (const i of track.lanes[0]) {
        const a = (from[i] / total) * width, w = Math.max(0.6, ((to[i] - from[i]) / total) * width);
        if (a + w <= until) continue;
        pen.fillStyle = color[slices.flags[i] & 1 ? "wait" : kinds[slices.kind[i]]];
        pen.fillRect(a, row * high + 1, w, Math.max(1, high - 2));
        until = a + w + 0.2;
      }
    });
    return picture;
  }

  function paintOverview() {
    const [pen, width] = prepare(overview, 34);
    const key = `${overview.width} ${cutIdle.checked} ${color.card}`;
    if (backdrop?.key !== key) backdrop = { key, picture: paintBackdrop(width) };
    pen.drawImage(backdrop.picture, 0, 0, width, 34);
    const a = (view.from / total) * width, b = (view.to / total) * width;
    pen.globalAlpha = 0.55;
    pen.fillStyle = color.paper;
    pen.fillRect(0, 0, a, 34);
    pen.fillRect(b, 0, width - b, 34);
    pen.globalAlpha = 1;
    pen.strokeStyle = color.accent;
    pen.strokeRect(a + 0.5, 0.5, Math.max(1, b - a - 1), 33);
  }

  // ---- the view ----

  function show(a, b) {
    const least = Math.min(total, 50), size = Math.min(total, Math.max(least, b - a));
    const start = Math.max(0, Math.min((a + b - size) / 2, total - size));
    view = { from: start, to: start + size };
    draw();
  }

  function zoom(factor, fraction = 0.5) {
    const size = view.to - view.from, grown = Math.min(total, Math.max(Math.min(total, 50), size * factor));
    const start = view.from + fraction * (size - grown);
    show(start, start + grown);
  }

  const pan = (fraction) => {
    const by = fraction * (view.to - view.from);
    const bounded = Math.max(-view.from, Math.min(by, total - view.to));
    show(view.from + bounded, view.to + bounded);
  };

  // ---- pointing ----

  function hit(clientX, clientY) {
    const area = canvas.getBoundingClientRect(), y = clientY - area.top + rows.scrollTop;
    if (clientY - area.top < AXIS) return -1;
    const where = view.from + ((clientX - area.left) / area.width) * (view.to - view.from);
    const slack = (4 / area.width) * (view.to - view.from);
    for (const track of tracks) {
      const lane = track.lanes[Math.floor((y - track.top - HEAD) / LANE)];
      if (!lane || y < track.top + HEAD) continue;
      let best = -1, least = slack;
      for (let k = bisect(lane.length, (j) => to[lane[j]] < where - slack); k < lane.length; k++) {
        const i = lane[k];
        if (from[i] > where + slack) break;
        const far = Math.max(from[i] - where, where - to[i], 0);
        if (far <= least) [best, least] = [i, far];
        if (!far) break;
      }
      return best;
    }
    return -1;
  }

  function describe(i) {
    const node = make("div", { className: "call" }), flags = slices.flags[i];
    const [title, ...lines] = texts[slices.about[i]].split("\n");
    const own = slices.own[i], all = slices.length[i];
    node.append(
      make("b", { textContent: texts[slices.name[i]] }),
      make("i", { textContent: `${format(all)}${own && Math.abs(own - all) > 0.1 * all ? `, ${format(own)} without its parts` : ""}, at ${format(slices.start[i])}` }),
      make("div", { textContent: title }),
    );
    for (const line of lines)
      node.append(make("div", { textContent: line, className: line.startsWith("waits: ") ? "why" : "" }));
    if (flags & 1 && arrows.some(([, b]) => b === i)) {
      const after = arrows.filter(([, b]) => b === i).map(([a]) => texts[slices.name[a]]);
      node.append(make("div", { className: "why", textContent: `after ${[...new Set(after)].slice(0, 4).join(", ")}` }));
    }
    if (stacks[slices.stack[i]]) node.append(make("code", { textContent: stacks[slices.stack[i]] }));
    return node;
  }

  function point(i, event) {
    if (i !== pointed) draw();
    pointed = i;
    if (i < 0) hint.hidden = true;
    else showHint(describe(i), event.clientX, event.clientY);
  }

  function keep(i) {
    kept = i;
    detail.hidden = i < 0;
    if (i >= 0) detail.replaceChildren(...describe(i).childNodes);
    draw();
  }

  const pressed = new Map(); // pointers that are down, and where
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pressed.set(event.pointerId, event);
    moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pressed.get(event.pointerId), width = canvas.clientWidth;
    if (!before) return point(hit(event.clientX, event.clientY), event);
    pressed.set(event.pointerId, event);
    moved += Math.abs(event.clientX - before.clientX);
    if (pressed.size === 1) return pan((before.clientX - event.clientX) / width);
    const other = [...pressed.values()].find((each) => each.pointerId !== event.pointerId);
    const old = Math.abs(before.clientX - other.clientX), now = Math.abs(event.clientX - other.clientX);
    if (old > 5 && now > 5) zoom(old / now, (other.clientX - canvas.getBoundingClientRect().left) / width);
  });
  for (const kind of ["pointerup", "pointercancel"])
    canvas.addEventListener(kind, (event) => {
      pressed.delete(event.pointerId);
      if (kind === "pointerup" && moved < 5 && !pressed.size) keep(hit(event.clientX, event.clientY));
    });
  canvas.addEventListener("pointerleave", (event) => point(-1, event));
  canvas.addEventListener("dblclick", (event) => zoom(0.25, (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth));
  canvas.addEventListener(
    "wheel",
    (event) => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
      if (event.ctrlKey || event.metaKey) {
        zoom(Math.exp(event.deltaY / 200), (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth);
      } else if (sideways) pan((event.deltaX || event.deltaY) / canvas.clientWidth);
      else return; // the page scrolls
      event.preventDefault();
    },
    { passive: false },
  );
  canvas.addEventListener("keydown", (event) => {
    const action = {
      "+": () => zoom(0.5), "=": () => zoom(0.5), w: () => zoom(0.5), "-": () => zoom(2), s: () => zoom(2),
      ArrowLeft: () => pan(-0.2), a: () => pan(-0.2), ArrowRight: () => pan(0.2), d: () => pan(0.2),
      0: () => show(0, total), Escape: () => keep(-1),
    }[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    action();
    event.preventDefault();
  });

  let anchor = null;
  overview.addEventListener("pointerdown", (event) => {
    overview.setPointerCapture(event.pointerId);
    anchor = event.offsetX;
  });
  overview.addEventListener("pointermove", (event) => {
    if (anchor === null || Math.abs(event.offsetX - anchor) < 4) return;
    const [a, b] = [anchor, event.offsetX].sort((p, q) => p - q).map((p) => (p / overview.clientWidth) * total);
    show(a, b);
  });
  overview.addEventListener("pointerup", (event) => {
    if (anchor !== null && Math.abs(event.offsetX - anchor) < 4) {
      const center = (event.offsetX / overview.clientWidth) * total, half = (view.to - view.from) / 2;
      show(center - half, center + half);
    }
    anchor = null;
  });

  // ---- controls ----

  cutIdle.onchange = () => {
    const [a, b] = [view.from, view.to].map((where) => {
      cutIdle.checked = !cutIdle.checked;
      const time = timeOf(where);
      cutIdle.checked = !cutIdle.checked;
      return time;
    });
    place();
    show(at(a), at(b));
  };
  find.oninput = () => {
    const words = find.value.trim().toLowerCase();
    const found = texts.map((text, i) => (text.toLowerCase().includes(words) ? i : -1));
    matches = words ? new Set(found) : null;
    draw();
  };
  rows.addEventListener("scroll", draw);
  addEventListener("themed", () => (readColors(), draw()));
  new ResizeObserver(draw).observe(rows);
  readColors();
  place();
  show(0, total);
})();
