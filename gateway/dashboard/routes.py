"""The dashboard's URLs, and who may see what.

    GET  /dashboard/login        POST /dashboard/login, /dashboard/logout      with a form token
    GET  /dashboard              overview                        │ ?tenant=ID: an operator chooses, a tenant is
    GET  /dashboard/cache        tree, blocks, quotas, evictions │ itself; another tenant's id is answered as if
    GET  /dashboard/live         requests in the engine          │ it did not exist
    GET  /dashboard/tenants      operators only
    GET  /dashboard/static/…     chart library, htmx, style: shipped with the package, no CDN

Everything is rendered on the server; htmx fetches a page again every ten seconds and swaps its content.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from litestar import MediaType, Request, Response, Router, get, post
from litestar.datastructures import Cookie, State
from litestar.exceptions import HTTPException
from litestar.plugins.jinja import JinjaTemplateEngine
from litestar.response import Redirect, Template
from litestar.static_files import create_static_files_router  # pyright: ignore[reportUnknownVariableType]
from litestar.template.config import TemplateConfig

from engine.errors import NotFoundError
from engine.settings import Settings
from gateway.dashboard.formats import FILTERS
from gateway.dashboard.login import Login
from gateway.dashboard.pages import Context, Pages
from gateway.dashboard.session import (
    FORM_COOKIE,
    SESSION_COOKIE,
    SESSION_SECONDS,
    Session,
    SessionSigner,
    new_form_cookie,
)
from gateway.engine_port import Engine
from gateway.history_reader import SPANS, HistoryReader, span_of
from gateway.tenants import TenantDirectory

WebRequest = Request[Any, Any, State]

_HERE = Path(__file__).parent
_SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class LoginRequiredError(Exception):
    """Nobody is logged in. Answered with a redirect to the login page."""


class Dashboard:
    def __init__(self, settings: Settings, engine: Engine, tenants: TenantDirectory, history: HistoryReader) -> None:
        self._signer = SessionSigner(tenants.secret)
        self._login = Login(tenants, settings.security.operator_password_hash)
        self._pages = Pages(engine, history, settings.usage, tenants.owner_of)

    # ------------------------------------------------------------ who

    def viewer(self, request: WebRequest) -> Session:
        session = self._signer.read(request.cookies.get(SESSION_COOKIE))
        if session is None or not self._login.still_holds(session):
            raise LoginRequiredError
        return session

    @staticmethod
    def subject(viewer: Session, asked: str | None) -> str | None:
        """Whose figures are shown; None: everyone's. Raises NotFoundError for what is not the viewer's to know."""
        if viewer.role == "operator":
            return asked or None
        if asked and asked != viewer.tenant_id:
            raise NotFoundError("There is no such tenant.")
        return viewer.tenant_id

    # ------------------------------------------------------------ pages

    async def page(
        self, request: WebRequest, name: str, gather: Callable[[str | None], Awaitable[Context]]
    ) -> Template:
        viewer = self.viewer(request)
        who = self.subject(viewer, request.query_params.get("tenant"))
        return self._template(request, f"{name}.html.jinja", viewer, {"who": who, **await gather(who)})

    async def overview(self, request: WebRequest) -> Template:
        span = span_of(request.query_params.get("span", ""))
        return await self.page(request, "overview", lambda who: self._pages.overview(who, span))

    async def cache(self, request: WebRequest) -> Template:
        return await self.page(request, "cache", self._pages.cache)

    async def live(self, request: WebRequest) -> Template:
        return await self.page(request, "live", self._pages.live)

    async def tenants(self, request: WebRequest) -> Template:
        viewer = self.viewer(request)
        if viewer.role != "operator":
            raise NotFoundError("There is no such page.")
        query = request.query_params
        number = query.get("page", "1")
        span = span_of(query.get("span", ""))
        page = int(number) if number.isascii() and number.isdigit() and len(number) < 6 else 1
        context = await self._pages.tenants(span, query.get("search", "")[:100], page)
        return self._template(request, "tenants.html.jinja", viewer, {"who": None, **context})

    def _template(self, request: WebRequest, name: str, viewer: Session, context: Context) -> Template:
        cookie = request.cookies.get(FORM_COOKIE) or new_form_cookie()
        common: Context = {
            "viewer": viewer,
            "path": request.url.path.rstrip("/"),
            "span": span_of(request.query_params.get("span", "")),
            "spans": SPANS,
            "form_token": self._signer.form_token(cookie),
        }
        return Template(
            name,
            context={**common, **context},
            cookies=[_cookie(request, FORM_COOKIE, cookie)],
            headers=_SECURITY_HEADERS,
        )

    # ------------------------------------------------------------ login

    def login_form(self, request: WebRequest, problem: str = "", status: int = 200) -> Template:
        cookie = request.cookies.get(FORM_COOKIE) or new_form_cookie()
        context = {
            "problem": problem,
            "form_token": self._signer.form_token(cookie),
            "takes_password": self._login.takes_password,
        }
        return Template(
            "login.html.jinja",
            context=context,
            status_code=status,
            cookies=[_cookie(request, FORM_COOKIE, cookie)],
            headers=_SECURITY_HEADERS,
        )

    async def log_in(self, request: WebRequest) -> Template | Redirect:
        form = await request.form()
        if not self._signer.is_form_token(request.cookies.get(FORM_COOKIE), str(form.get("form_token", ""))):
            return self.login_form(request, "The form was too old. Try again.", 403)
        address = request.client.host if request.client is not None else ""
        if not self._login.throttle.allows(address):
            return self.login_form(request, "Too many attempts. Wait a minute.", 429)
        session = await self._login.log_in(str(form.get("credential", "")).strip()[:1024])
        if session is None:
            return self.login_form(request, "That is not a valid key or password.", 401)
        cookie = _cookie(request, SESSION_COOKIE, self._signer.sign(session), SESSION_SECONDS)
        return Redirect("/dashboard", status_code=303, cookies=[cookie], headers=_SECURITY_HEADERS)

    async def log_out(self, request: WebRequest) -> Redirect:
        form = await request.form()
        if not self._signer.is_form_token(request.cookies.get(FORM_COOKIE), str(form.get("form_token", ""))):
            return Redirect("/dashboard", status_code=303)
        gone = _cookie(request, SESSION_COOKIE, "", 0)
        return Redirect("/dashboard/login", status_code=303, cookies=[gone])


def dashboard_router(settings: Settings, engine: Engine, tenants: TenantDirectory, history: HistoryReader) -> Router:
    dashboard = Dashboard(settings, engine, tenants, history)

    @get("/")
    async def overview(request: WebRequest) -> Template:
        return await dashboard.overview(request)

    @get("/cache")
    async def cache(request: WebRequest) -> Template:
        return await dashboard.cache(request)

    @get("/live")
    async def live(request: WebRequest) -> Template:
        return await dashboard.live(request)

    @get("/tenants")
    async def tenant_list(request: WebRequest) -> Template:
        return await dashboard.tenants(request)

    @get("/login")
    async def login_form(request: WebRequest) -> Template:
        return dashboard.login_form(request)

    @post("/login", status_code=200)
    async def log_in(request: WebRequest) -> Template | Redirect:
        return await dashboard.log_in(request)

    @post("/logout", status_code=303)
    async def log_out(request: WebRequest) -> Redirect:
        return await dashboard.log_out(request)

    static = create_static_files_router(
        "/static", [_HERE / "static"], name="dashboard-static", cache_control=None, include_in_schema=False
    )
    handlers = [overview, cache, live, tenant_list, login_form, log_in, log_out, static]
    return Router(
        "/dashboard",
        route_handlers=handlers,
        exception_handlers={LoginRequiredError: _to_login, NotFoundError: _not_found, HTTPException: _http_error},
    )


def template_config() -> TemplateConfig[JinjaTemplateEngine]:
    """Autoescaping is the engine's default: document ids and tenant names are other people's text."""
    engine = JinjaTemplateEngine(directory=_HERE / "templates")
    for name, function in FILTERS.items():
        engine.engine.filters[name] = function  # pyright: ignore[reportUnknownMemberType]
    return TemplateConfig(instance=engine)


def _cookie(request: WebRequest, name: str, value: str, max_age: int | None = None) -> Cookie:
    return Cookie(
        key=name,
        value=value,
        max_age=max_age,
        path="/dashboard",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


def _to_login(request: WebRequest, _: LoginRequiredError) -> Response[bytes]:
    if request.headers.get("hx-request"):  # a swapped-in login form would be a page inside a page
        return Response(b"", status_code=401, headers={"hx-redirect": "/dashboard/login", **_SECURITY_HEADERS})
    return Response(b"", status_code=303, headers={"location": "/dashboard/login", **_SECURITY_HEADERS})


def _not_found(_: WebRequest, error: NotFoundError) -> Response[bytes]:
    return Response(error.message.encode(), status_code=404, media_type=MediaType.TEXT, headers=_SECURITY_HEADERS)


def _http_error(_: WebRequest, error: HTTPException) -> Response[bytes]:
    message = quote(error.detail, safe=" .,:'`/")
    return Response(
        message.encode(), status_code=error.status_code, media_type=MediaType.TEXT, headers=_SECURITY_HEADERS
    )
